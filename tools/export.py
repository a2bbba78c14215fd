"""TODO"""

import sys

from pretrained.tensors import new_folder, save_pretrained


def main(settings, folder):
    from pretrained.lora import merge
    from runs.checkpoint import load_run

    new_folder(settings.to)  # before the work
    run = load_run(folder, "cpu")
    if settings.dtype == "float32":
        run.model.float()  # before adapters are merged into it and rounded
    save_pretrained(merge(run.model), settings.to, run.tokenizer, settings.dtype or None)
    print(
        f"{run.path} is now {settings.to}, for transformers' AutoModelForCausalLM and whatever else reads such folders"
    )


if __name__ == "__main__":
    from options import friendly_errors, read_settings
    from settings import ExportSettings

    with friendly_errors():
        settings, _, folder = read_settings(ExportSettings, sys.argv[1:], positional="folder")
        main(settings, folder)
