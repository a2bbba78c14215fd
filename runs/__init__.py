"""A run's folder: its log and checkpoints, when they are written, and what is refused before torch is imported.

Importing it sets environment variables that torch reads when it is imported.
"""

import os
from itertools import chain, count
from pathlib import Path


def set_environment():
    """What torch and oneDNN read when they are imported, unless the user has set it."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # The code that oneDNN compiled for each shape of a product. Its default of 1,024 shapes takes up to 600 MiB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


def free_name(path: Path) -> Path:
    """-> the first of path, path.1, path.2, ... that does not exist."""
    names = chain([path.name], (f"{path.name}.{n}" for n in count(1)))
    return next(p for p in map(path.with_name, names) if not p.exists())


set_environment()
