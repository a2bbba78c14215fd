"""Memory: what is allocated when, tensors on the host, what an iteration will need, and going on after out-of-memory.

    ledger  live storages and their bytes            meter   live, reserved and peak bytes by phase
    host    tensors in host memory                   lean    autograd functions that keep fewer bytes than PyTorch's
    plan    peak bytes of an iteration, beforehand   fit     the cheapest options that fit a budget
    oom     smaller pieces after out-of-memory       cpu    fast products; cores shared with other processes
    streams copies to and from the host that overlap with compute
    cuda    shapes of a GPU; uploads; its cache      processes  a process's share of the work

Left out: what an iteration is. The planner is given a function that runs one.
"""

from memory.host import available_on_host, borrowed, new_on_host, spare_copy, stream_from_host, to_host
from memory.ledger import HOST, MIB, HostLedger, LiveBytes, is_planned, kind_of
from memory.meter import MemoryMeter, resident_bytes, tensor_bytes
from memory.oom import Pieces, attempts
from memory.processes import OneProcess
