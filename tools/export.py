"""Convert a run's newest checkpoint to a Hugging Face folder, adapters merged, for transformers and others.

    python -m tools.export out/grpo_gsm8k --to=export/mine [--dtype=bfloat16]

Left out: adapters as a folder of their own. Tests: tests/test_models.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as a script: python tools/export.py

from options import friendly_errors, read_settings
from pretrained.tensors import new_folder, save_pretrained
from runs.checkpoint import find_run
from settings import ExportSettings


def main(settings: ExportSettings, folder: str):
    """Raises SnugError if `folder` has no run or settings.to exists."""
    new_folder(settings.to)  # refuses a bad name before torch is imported
    checkpoint = find_run(folder)
    from lora import merge
    from runs.loading import load_run

    run = load_run(checkpoint, "cpu")
    if settings.dtype == "float32":  # before adapters are merged and rounded
        run.model.float()
    save_pretrained(merge(run.model), settings.to, run.tokenizer, settings.dtype or None)
    print(f"{run.path} is now {settings.to}, a folder for transformers' AutoModelForCausalLM")


if __name__ == "__main__":
    with friendly_errors():
        settings, _, folder = read_settings(ExportSettings, sys.argv[1:], positional="folder")
        main(settings, folder)
