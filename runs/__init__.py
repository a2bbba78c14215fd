"""A run's folder: its log and checkpoints, when they are written, and what is refused before torch is imported.

Importing it sets what Ctrl-C does in a command, and environment variables that torch reads when it is imported.
"""

import os

import runs.ctrl_c  # noqa: F401


def set_environment():
    """What torch and oneDNN read when they are imported, unless the user has set it."""
    from importlib.metadata import version  # after Ctrl-C is set

    # On AMD each 20 MiB of expandable segments takes a file descriptor: github.com/ROCm/rocm-systems/issues/10604
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "rocm" not in version("torch"):  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # The code that oneDNN compiled for each shape of a product. Its default of 1,024 shapes takes up to 600 MiB.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")


set_environment()
