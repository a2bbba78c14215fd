"""Notes at a command's start: about what is allowed, but seldom meant. One line each; nothing is refused here.

Left out: what only completions show (hints.py).
"""

from data.task import split_beginning
from runs.prepare import Prepared
from snug.tokenizer import Tokenizer


def notes(prepared: Prepared) -> list[str]:
    """-> the notes of a run, or of an evaluation, which does not train."""
    settings, task, tokenizer = prepared.settings, prepared.task, prepared.tokenizer
    rows = sum(getattr(task, "rows", {}).values(), []) or [task.row("train", 0)]
    prompts = [task.as_prompt(row["prompt"]) for row in rows]
    lines, chat = unused_template(tokenizer, prompts), tokenizer.chat
    has_tools = prepared.toolbox and prepared.toolbox.schemas
    if has_tools and chat and (isinstance(prompts[0], str) or chat.call_form == "inline"):
        # Where a chat template describes no tools, the prompt must describe them.
        lines.append(
            "the chat template does not tell the model of its tools; show a call in the prompt"
        )
    if found := [match[0] for match in map(tokenizer.spellings.search, map(str, prompts)) if match]:
        lines.append(
            f"{len(found):,} of {len(rows):,} prompts spell special tokens, such as {found[0]}: in "
            f"{sum(map(tokenizer.is_rendered, prompts)):,} they become special tokens, as in transformers; "
            "elsewhere, as in messages, they stay text"
        )
    begun = sum(split_beginning(prompt)[1] != "" for prompt in prompts)
    for number, what in (task.answered, "it is left out"), (begun, "completions continue it"):
        if number:
            lines.append(
                f"{number:,} of {len(rows):,} prompts end with a message of the assistant: {what}"
            )
    rate, usual = settings.learning_rate, settings.default_learning_rate
    if settings.max_iters and prepared.is_pretrained:
        if rate == usual:
            lines.append(f"learning_rate={rate:g}, the default for pretrained weights")
        if rate > 11 * usual:
            lines.append(f"learning_rate={rate:g}; the default for pretrained weights is {usual:g}")
    return lines


def unused_template(tokenizer: Tokenizer, prompts: list[str | list[dict]]) -> list[str]:
    plain = [each for each in prompts if isinstance(each, str) and not tokenizer.is_rendered(each)]
    if tokenizer.chat is None or not plain:
        return []
    return ["the prompts are plain text, without the model's chat template; --chat adds it"]
