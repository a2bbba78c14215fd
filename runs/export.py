"""Convert a run's newest checkpoint to a Hugging Face folder, adapters merged, for transformers and others.

    python -m runs.export out/grpo_gsm8k --to=export/mine [--dtype=bfloat16]
    python -m runs.export out/grpo_gsm8k --to=export/adapters --adapters       # PEFT's folder, beside the base weights

Tests: tests/test_models.py, tests/test_nf4.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # also as a script: python runs/export.py

from runs.checkpoint import Checkpoint, base_of, find_run
from settings import ExportSettings
from snug.options import SnugError, friendly_errors, read_settings
from snug.pretrained.adapters import save_adapters
from snug.pretrained.hub import hub_name
from snug.pretrained.shapes import is_pretrained
from snug.pretrained.tensors import new_folder, save_pretrained

TEXT = "A train leaves at 9:40 and arrives at 11:05. How long is the ride? From 9:40 to 11:05 it is 1 h 25 min."
# Rounding to bfloat16 moves a weight by up to 1/512 of it, however little the adapters change it. It matters if it
# moves the logits by more than a tenth of what the adapters do. A KL grows as the square of that.
MOST_LOST = 0.01


def main(settings: ExportSettings, folder: str):
    """Raises SnugError if `folder` has no run or settings.to exists."""
    new_folder(settings.to)  # refuses a bad name before torch is imported
    checkpoint = find_run(folder)
    base = base_name(checkpoint) if settings.adapters else ""
    from runs.loading import load_run
    from snug.lora import adapters_off, merge

    run = load_run(checkpoint, "cpu")
    if base:
        save_adapters(run.model, settings.to, base, run.settings)
        print(f"the adapters of {run.path} are now in {settings.to}, for PEFT beside {base}")
        return
    if settings.dtype == "float32":  # before adapters are merged and rounded
        run.model.float()
    learned = logprobs(run)
    with adapters_off(run.model):
        untaught = logprobs(run)
    merge(run.model)
    if settings.dtype == "bfloat16":
        run.model.bfloat16()
    save_pretrained(run.model, settings.to, run.tokenizer)
    print(f"{run.path} is now {settings.to}, a folder for transformers' AutoModelForCausalLM")
    merged = logprobs(run)
    lost, taught = (
        float((learned.exp() * (learned - other)).sum(1).mean()) for other in (merged, untaught)
    )
    if taught:  # there are adapters
        print(
            f"merged: log-probs moved by up to {(merged - learned).abs().max():.1e}, "
            f"KL {lost:.1e} nats a token; the adapters' own KL is {taught:.1e}"
        )
        if lost > MOST_LOST * taught:
            print("warning: rounding loses much of what was learned; try --adapters or --dtype=float32")


def logprobs(run):
    """-> (T, V) in float64, for each token of TEXT those of the next."""
    import torch

    model = run.model
    with torch.no_grad():
        ids = torch.tensor([run.tokenizer.encode(TEXT)[: model.config.block_size]])
        return model.logits(model(ids))[0, :, : model.config.n_vocab].double().log_softmax(-1)


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
