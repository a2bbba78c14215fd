"""The settings of the other commands."""

from dataclasses import dataclass

from data import TASKS, TaskOptions
from data.episodes import EpisodeOptions
from settings.loops import RewardOptions
from settings.shared import DTYPES, RunOptions
from snug.options import SnugError, option, option_of


@dataclass
class CompletionOptions:
    """What is sampled, and where."""

    num_samples: int = option(
        1, "sampled completions of a prompt; evaluate.py adds the greedy one", minimum=1
    )
    max_new_tokens: int = option(
        0, "longest completion in tokens; left out: the run's, or a Hugging Face model's 256"
    )
    temperature: float = option(1.0, "divides the logits; 0: the likeliest tokens")
    device: str = option_of(RunOptions, "device", default="auto")


@dataclass
class SampleSettings(CompletionOptions, EpisodeOptions):
    """Completions from a run's newest checkpoint: the options of sample.py."""

    prompt: str = option("", "text to complete; empty: a held-out prompt of the run's task")
    chat: bool = option(False, "write the prompt as a message; left out: as in the run")
    system_prompt: str = option("", "chat: system message; empty: the run's")
    chat_template_kwargs: dict = option_of(TaskOptions, "chat_template_kwargs", default={})
    seed: int = option(1, "the same seed gives the same completions")

    def check(self):
        if (self.chat or self.system_prompt) and not self.prompt:
            raise SnugError(
                "chat and system_prompt need --prompt; a prompt of the run's task is asked as in the run"
            )


@dataclass
class EvaluateSettings(CompletionOptions, TaskOptions, EpisodeOptions, RewardOptions):
    """pass@k and majority votes of a run's newest checkpoint on held-out prompts: options of evaluate.py.

    The run's options of task and reward hold, unless you give others. Another task has the defaults shown here.
    """

    usual = """task data_file num_prompts num_samples temperature max_new_tokens reward_funcs
    samples_file seed device"""

    task: str = option("", "the task; empty: the run's", choices=("", *TASKS))
    num_prompts: int = option(500, "held-out prompts, at most all", minimum=1)
    samples_file: str = option(
        "",
        "all completions; empty: evaluation-<task>-test.jsonl in the run, or in out/<name>; none: off",
    )
    seed: int = option(0, "seed of the sampled completions; 0: as in a run's evaluations")

    def check(self):
        if self.num_samples > 1 and self.temperature == 0:
            raise SnugError(
                f"temperature=0 with num_samples={self.num_samples} is the same completion each time; "
                "leave num_samples out, or try --temperature=1"
            )


@dataclass
class FromGGUFSettings:
    """A GGUF file as a Hugging Face folder: the options of runs/from_gguf.py."""

    to: str = option("", "the new folder")
    dtype: str = option("float32", "dtype of the weights", choices=DTYPES)

    def check(self):
        if not self.to:
            raise SnugError("name the new folder: --to=export/mine")


@dataclass
class ExportSettings(FromGGUFSettings):
    """A run's newest checkpoint as a Hugging Face folder: the options of runs/export.py."""

    dtype: str = option("", "dtype of the weights; empty: as in the run", choices=("", *DTYPES))
    adapters: bool = option(False, "write only the adapters of a run with lora_rank, as PEFT does")
