"""A model's name on the Hugging Face hub -> a local folder, with huggingface_hub and its cache.

    local_folder("Qwen/Qwen2.5-0.5B-Instruct")     # or @ and a branch, a tag, a commit
    local_folder("models/mine")                    # a path stays what it is

Only files that snug reads are downloaded; a plan needs no weights. For a commit in the cache no request is made
(huggingface_hub 0.36: one). Without a network the cached snapshot is used.

Left out: pickles, uploads, names without an owner. Tests: tests/test_hub.py.
"""

import os
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from snug.options import in_one_line
from snug.options.progress import phase
from snug.pretrained.shapes import read_config
from snug.pretrained.tensors import weight_files

# Repository, owner, revision. Names in out/ and models/ are local folders, even before they exist.
NAME = re.compile(r"(?!out/|models/)((\w[\w.-]*)/\w[\w.-]*)(?:@(.+))?")
SNAPSHOT = re.compile(".*/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")  # in the cache
FILES = """config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
chat_template.jinja model.safetensors.index.json adapter_config.json adapter_model.safetensors""".split()


@phase("downloading")
def local_folder(name: str | Path, weights: bool = True) -> Path:
    """owner/name or owner/name@revision -> its snapshot in the cache. weights=False: perhaps without the weights.

    Any other name is a path; so is owner/name if there is a folder `owner`. Raises SnugError.
    """
    found = NAME.fullmatch(str(name))
    if not found or os.path.isdir(found[2]):
        return Path(name)
    with in_one_line(
        f"{name}: is no folder, and the download from the hub failed; check name and network; for a gated model accept "
        "its licence and run `hf auth login`"
    ):
        from huggingface_hub import snapshot_download

        with redirect_stderr(StringIO()):  # no progress bar for small files
            folder = Path(snapshot_download(found[1], revision=found[3], allow_patterns=FILES))
    if not (folder / "adapter_config.json").is_file():
        read_config(folder)  # may refuse the model, before its weights are downloaded
    if weights:
        names = ["model.safetensors"]
        if (folder / "model.safetensors.index.json").is_file():
            names = [file.name for file in weight_files(folder)]
        with in_one_line(f"{name}: its weights cannot be downloaded; try again"):
            snapshot_download(found[1], revision=folder.name, allow_patterns=FILES + names)
    return folder


def hub_name(folder):
    """The folder of a snapshot -> owner/name@commit. Any other path stays what it is."""
    return SNAPSHOT.sub(r"\1/\2@\3", str(folder))
