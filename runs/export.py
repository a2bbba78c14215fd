"""Convert a run's newest checkpoint to a Hugging Face folder, adapters merged, for transformers and others.

    python -m runs.export out/grpo_gsm8k --to=export/mine [--dtype=bfloat16]
    python -m runs.export out/grpo_gsm8k --to=export/adapters --adapters       # PEFT's folder, beside the base weights

Tests: tests/test_models.py, tests/test_nf4.py.
"""

import sys

from runs.checkpoint import base_of, find_run
from settings import ExportSettings
from snug.options import SnugError, friendly_errors, read_settings
from snug.options.progress import speak
from snug.pretrained.adapters import save_adapters
from snug.pretrained.hub import hub_name
from snug.pretrained.shapes import is_pretrained
from snug.pretrained.tensors import new_folder, save_pretrained


def main(settings, folder: str):
    """Raises SnugError if `folder` has no run, if settings.to exists, or if PEFT cannot load the adapters."""
    new_folder(settings.to)  # refuses a bad name before torch is imported
    checkpoint = find_run(folder)
    if settings.adapters:
        if "base" not in checkpoint.state:
            raise SnugError(f"{checkpoint.path} has no adapters; leave --adapters out")
        base = base_of(checkpoint)
        if not is_pretrained(base.path) or base.state["weights"][1]:
            raise SnugError(f"the base {base.path} is no Hugging Face folder; leave --adapters out")
    from runs.loading import load_run
    from snug.lora import merge

    run = load_run(checkpoint, "cpu")
    if settings.adapters:
        save_adapters(run.model, settings.to, base.path, run.settings)
        print(f"{settings.to} has the adapters of {run.path}, for PEFT beside {hub_name(base.path)}")
        return
    if settings.dtype == "float32":  # before adapters are merged and rounded
        run.model.float()
    merge(run.model)
    if settings.dtype == "bfloat16":
        run.model.bfloat16()
    save_pretrained(run.model, settings.to, run.tokenizer)
    print(f"{run.path} is now {settings.to}, a folder for transformers")


if __name__ == "__main__":
    with friendly_errors():
        speak()
        settings, _, folder = read_settings(ExportSettings, sys.argv[1:], positional="folder")
        main(settings, folder)
