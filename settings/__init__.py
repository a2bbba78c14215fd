"""Every option of snug, once: type, default, unit, meaning. A task's own options are in data/.

A class whose name ends in Options is a topic: --help=all shows its options together, under its docstring. `usual` names
the options that --help shows. A command without `usual` shows all of its options.

A config (config/*.py) is a list of plain assignments that differ from these defaults. The command line overrides it:

    python grpo.py config/grpo_small.py --learning_rate=1e-4 --seed=3

shared    options of SFT and GRPO         loops     options of GRPO alone, and the settings of both loops
losses    what each loss is, its options  rules     what does not fit together
commands  the settings of the other commands

snug/options reads them. Nothing here imports torch, so that a typo is reported at once. Tests: tests/test_settings.py.
"""

from settings.commands import EvaluateSettings, ExportSettings, FromGGUFSettings, SampleSettings
from settings.loops import PRETRAINED_LENGTH, GRPOSettings, RewardOptions, SFTSettings
from settings.shared import ModelOptions
