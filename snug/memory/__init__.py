"""Memory: what is allocated, when and for what; what an iteration will need; how to go on after out-of-memory errors.

    ledger  live storages and their bytes            meter   live, reserved and peak bytes by phase
    plan    peak bytes of an iteration, beforehand   fit     the cheapest options that fit a budget
    limits  how much is decoded and trained at once; less after an out-of-memory error

Left out: what an iteration is. The planner is given a function that runs one.
"""

from snug.memory.limits import Limits
from snug.memory.meter import MemoryMeter
