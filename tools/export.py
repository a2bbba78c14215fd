"""Convert a run's newest checkpoint to a Hugging Face folder, adapters merged, for transformers and others.

    python -m tools.export out/grpo_gsm8k --to=export/mine [--dtype=bfloat16]
    python -m tools.export out/grpo_gsm8k --to=export/adapters --adapters       # PEFT's folder, beside the base weights

Tests: tests/test_models.py, tests/test_nf4.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as a script: python tools/export.py

from options import SnugError, friendly_errors, read_settings
from pretrained.adapters import save_adapters
from pretrained.hub import hub_name
from pretrained.shapes import is_pretrained
from pretrained.tensors import new_folder, save_pretrained
from runs.checkpoint import Checkpoint, base_of, find_run
from settings import ExportSettings


def main(settings: ExportSettings, folder: str):
    """Raises SnugError if `folder` has no run or settings.to exists."""
    new_folder(settings.to)  # refuses a bad name before torch is imported
    checkpoint = find_run(folder)
    base = base_name(checkpoint) if settings.adapters else ""
    from lora import merge
    from runs.loading import load_run

    run = load_run(checkpoint, "cpu")
    if base:
        save_adapters(run.model, settings.to, base, run.settings)
        print(f"the adapters of {run.path} are now in {settings.to}, for PEFT beside {base}")
        return
    if settings.dtype == "float32":  # before adapters are merged and rounded
        run.model.float()
    save_pretrained(merge(run.model), settings.to, run.tokenizer, settings.dtype or None)
    print(f"{run.path} is now {settings.to}, a folder for transformers' AutoModelForCausalLM")


def base_name(checkpoint: Checkpoint) -> str:
    """The Hugging Face model that a checkpoint's adapters are for. Raises SnugError if there is none."""
    if "base" not in checkpoint.state:
        raise SnugError(f"{checkpoint.path} has no adapters; leave --adapters out")
    base = base_of(checkpoint)
    if not is_pretrained(base.path) or base.state["weights"][1]:
        raise SnugError(
            f"the adapters' base, {base.path}, is no Hugging Face folder; leave --adapters out"
        )
    return hub_name(base.path)


if __name__ == "__main__":
    with friendly_errors():
        settings, _, folder = read_settings(ExportSettings, sys.argv[1:], positional="folder")
        main(settings, folder)
