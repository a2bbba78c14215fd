"""What a command says at its start because it is allowed, but seldom meant. A line each; nothing is refused here.

Left out: what only completions show (hints.py).
"""

import re

from runs.prepare import Prepared
from settings import GRPOSettings
from snug.pretrained.shapes import is_pretrained
from snug.tokenizer import Tokenizer

LARGE = 1e-4  # a learning rate that spoils all weights of a pretrained model soon


def notes(prepared: Prepared) -> list[str]:
    """Of a run, or of an evaluation, which does not train."""
    settings, task, tokenizer = prepared.settings, prepared.task, prepared.tokenizer
    prompt = task.as_prompt(task.row("train", 0)["prompt"])
    lines = unused_template(tokenizer, prompt) + untold_tools(prepared, prompt)
    prompts = [row["prompt"] for rows in getattr(task, "rows", {}).values() for row in rows]
    lines += spelled(tokenizer, prompts)
    if isinstance(settings, GRPOSettings) and task.answered:
        lines.append(
            f"{task.answered:,} of {len(prompts):,} prompts end with a message of the assistant; it is left out: a "
            "completion is a whole answer, and does not go on behind its beginning"
        )
    origin = prepared.origin
    trains_all = origin and is_pretrained(origin.path) and not settings.lora_rank
    if settings.max_iters and trains_all and settings.learning_rate > LARGE:
        lines.append(
            f"learning_rate={settings.learning_rate:g} for all weights of a pretrained model; usual are 1e-6 to 1e-5, "
            "with --lora_rank=16 1e-5 to 1e-4"
        )
    return lines


def unused_template(tokenizer: Tokenizer, prompt: str | list[dict]) -> list[str]:
    if tokenizer.chat is None or not isinstance(prompt, str):
        return []
    return ["the model has a chat template, and prompts of text do without it; --chat asks them in it"]


def untold_tools(prepared: Prepared, prompt: str | list[dict]) -> list[str]:
    """Where a chat template describes no tools, a prompt has to."""
    toolbox, chat = prepared.toolbox, prepared.tokenizer.chat
    if not toolbox or not toolbox.schemas or not chat:
        return []
    if not isinstance(prompt, str) and chat.call_form != "inline":
        return []
    return [
        "nothing tells the model of its tools: its chat template does not; show a call in the prompt"
    ]


def spelled(tokenizer: Tokenizer, prompts: list[str | list[dict]]) -> list[str]:
    """transformers would read these as special tokens."""
    special = re.compile("|".join(map(re.escape, tokenizer.special)))
    found = [match[0] for match in map(special.search, map(str, prompts)) if match and match[0]]
    if not found:
        return []
    return [
        f"{len(found):,} of {len(prompts):,} prompts spell special tokens, such as {found[0]}; here they are ordinary "
        "text: only a chat template writes special tokens; give messages, with --chat"
    ]
