"""Chat messages to one text, by the jinja template that a tokenizer comes with.

The template runs in jinja's sandbox, sees the messages and the names of tokens, and writes what `transformers` would
get. It is trusted with time and memory, as the weights are: only a range is limited, to 100,000 numbers.

Only the template may write special tokens. A content that spells one, or a part of one at its ends, is rendered again
with marks instead of those characters; the special tokens of that text are the template's. Marks are lone surrogates,
which no other text has.

Left out: tools, documents, images, other keys of a message than role and content. Tests: tests/test_tokenizer.py.
"""

import json
import re
from datetime import datetime
from functools import partial

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from options import SnugError, in_one_line


class Chat:
    """source: the template. variables: {"bos_token": "<s>", ...} for it. special: spellings of special tokens.

    now: what strftime_now tells, if the template asks; the run's first day, so that its prompts stay the same.
    """

    def __init__(self, source: str, variables: dict, special: list[str], now: datetime | None = None):
        self.source, self.variables, self.special, self.template = source, variables, special, None
        self.functions = dict(raise_exception=raise_exception) | (
            dict(strftime_now=now.strftime) if now else {}
        )
        self.spellings = alternatives(special)
        self.heads = {name[:n] for name in special for n in range(1, len(name))}
        self.tails = {name[n:] for name in special for n in range(1, len(name))}
        self.longest = max(map(len, special))
        self.marks = {ord(char): 0xD800 + n for n, char in enumerate(sorted(set("".join(special))))}

    def render(self, messages: list[dict]) -> tuple[str, list[str] | None]:
        """[{"role": "user", "content": "Hi"}, ...] -> (text, parts).

        parts: None if all special tokens in the text are the template's; otherwise [text, special token, ..., text],
        whose texts may spell special tokens. Raises SnugError for a role that is no word or a template that fails.
        """
        for role in (message["role"] for message in messages):
            if not re.fullmatch(r"[A-Za-z0-9_-]+", role) or self.spellings.search(role):
                raise SnugError(f"a message's role must be a word, such as user, not {role!r:.60}")
        messages = [message | {"content": well_formed(message["content"])} for message in messages]
        text = well_formed(self.run(messages))
        marked = [message | {"content": self.marked(message["content"])} for message in messages]
        if marked == messages:
            return text, None
        parts = self.spellings.split(self.run(marked))
        if parts[1::2] == self.spellings.findall(text):
            return text, None
        unmarked = {mark: char for char, mark in self.marks.items()}
        parts = [part.translate(unmarked) for part in parts]
        if "".join(parts) != text:
            content = next(message["content"] for message in messages if message not in marked)
            seen = f"looks at a special token, or a part of one, in the message {content!r:.60}"
            raise SnugError(f"the chat template {seen}; take it out")
        return text, parts

    def marked(self, content):
        """Marks for spellings of special tokens, or, if the content begins or ends with a part of one, for all their
        characters: "<|im_" and "end|>" in two messages could make one together."""
        core = content.strip()
        ends = any(core[:n] in self.tails or core[-n:] in self.heads for n in range(1, self.longest))
        if ends or any(core in name for name in self.special):
            return content.translate(self.marks)
        return self.spellings.sub(lambda found: found.group().translate(self.marks), content)

    def run(self, messages):
        values = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        with in_one_line("the chat template fails"):
            self.template = self.template or make_environment().from_string(self.source)
            return self.template.render(**self.variables | self.functions | values)


def alternatives(spellings):
    """A pattern that matches the longest spelling at the leftmost place, as `tokenizers` does."""
    return re.compile("(" + "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) + ")")


def well_formed(text):
    """Lone surrogates, which UTF-8 cannot carry, become U+FFFD; two halves of a pair become their character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def make_environment():
    options = dict(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = partial(
        json.dumps, ensure_ascii=False
    )  # jinja's own escapes for HTML
    return environment


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} mark the assistant's text; here they write what is inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(["name:endgeneration"], drop_needle=True)
        ).set_lineno(line)


def raise_exception(message):
    raise TemplateError(message)
