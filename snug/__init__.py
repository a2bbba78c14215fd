"""What GRPO stands on, for use in any project, and in `home` the way to the scripts that stand on it.

    from snug import Task, train, train_sft
    from snug.logprobs import head_loss, token_logprobs

options    configs, command lines       device     the device and the host     memory     meter, plan, retries
kernels    Triton kernels and twins     logprobs   log-probs of tokens         tokenizer  text to ids and back
pretrained Hugging Face folders         sandbox    a confined child process    decoding   the decode batch and its cache
lora       adapters
"""

from snug import home

PLACES = {
    "Task": "data.task",
    "text_of": "data.task",
    "FileTask": "data.rows",
    "FileOptions": "data.rows",
    "last_number": "data.answers",
    "train": "grpo",
    "train_sft": "train_sft",
}


def __getattr__(name):
    """Imports when it is asked, because grpo imports torch."""
    if name not in PLACES:
        raise AttributeError(f"module 'snug' has no attribute {name!r}")
    return home.ours(PLACES[name]).__dict__["train" if name == "train_sft" else name]
