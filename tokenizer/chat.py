"""Chat messages to one text, by the jinja template that a tokenizer comes with.

The template runs in jinja's sandbox, sees the messages and the names of tokens, and writes what `transformers` would
get. Like the weights, it is trusted with time and memory; only a range is limited, to 100,000 numbers.

Only the template may write special tokens. To tell them from text that spells one, messages are rendered twice: the
second time their contents have marks instead of all characters of special tokens. Every special token of that text is
the template's. Marks are lone surrogates, which no other text has.

Left out: documents, images; marks in the tool_calls of a message. Tests: tests/test_tokenizer.py.
"""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import partial

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from options import SnugError, in_one_line

# A turn of the assistant that other messages answer. END is a lone surrogate too, so no other text has it.
END = "\udfff"
TURN = (dict(role="user", content="x"), dict(role="assistant", content=END))


class Chat:
    """source: the template. names: {"bos_token": "<s>", ...} for it. special: spellings of special tokens.

    now: the time for strftime_now: the run's first day, so that its prompts stay the same.
    tools: JSON schemas of functions (data/tools.py) that the template describes to the model; None: no tools.
    """

    def __init__(self, source: str, names: dict, special: Iterable[str], now: datetime | None = None):
        self.source, self.template, self.tools = source, None, None
        self.variables = names | dict(raise_exception=raise_exception)
        if now:
            self.variables["strftime_now"] = now.strftime
        # The longest spelling at the leftmost place, as `tokenizers` finds it.
        longest_first = sorted(special, key=len, reverse=True)
        self.spellings = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.marks = {ord(char): 0xD800 + n for n, char in enumerate(sorted(set("".join(special))))}
        self.characters = {mark: char for char, mark in self.marks.items()}

    def set_defaults(self, variables: dict):
        """Values of the template's variables, where the caller gives none. They become part of `source`.

        Raises SnugError for a variable that the template does not have.
        """
        defaults = ""
        for name, value in variables.items():
            if not re.search(rf"\b{re.escape(name)}\b", self.source):
                problem = f"the chat template has no variable {name!r:.60}; leave it out"
                raise SnugError(f"chat_template_kwargs: {problem}")
            defaults += f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
        if not self.source.startswith(defaults):  # a resumed run's template has them already
            self.source, self.template = defaults + self.source, None

    @property
    def call_form(self) -> str:
        """How the model writes calls of tools, by its template: hermes, llama or inline; see data/tools.py."""
        if "<tool_call>" in self.source:
            return "hermes"
        with in_one_line("the chat template fails"):
            names = meta.find_undeclared_variables(make_environment().parse(self.source))
        return "llama" if "tools" in names else "inline"

    def render(self, messages: list[dict], before: Iterable[dict] = ()):
        """[{"role": "user", "content": "Hi"}, ...] -> (text, [text, special token, text, ..., text]).

        The special tokens in the list are the template's; its texts may spell others. before=TURN: only what the
        template writes behind END. Raises SnugError for a role that is not a word or a template that fails.
        """
        for message in messages:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", message["role"]):
                role = message["role"]
                raise SnugError(f"a message's role must be a word, such as user, not {role!r:.60}")
        messages = [changed(message, well_formed) for message in messages]
        marked = [changed(message, lambda text: text.translate(self.marks)) for message in messages]
        text, marked = (self.run([*before, *each]) for each in (messages, marked))
        if before and not (END in text and END in marked):
            raise SnugError("the chat template fails (it leaves out the text of the assistant)")
        pieces = self.spellings.split(marked.rpartition(END)[2])
        return text.rpartition(END)[2], [piece.translate(self.characters) for piece in pieces]

    def run(self, messages: list[dict]) -> str:
        values = dict(messages=messages, tools=self.tools, documents=None, add_generation_prompt=True)
        with in_one_line("the chat template fails"):
            self.template = self.template or make_environment().from_string(self.source)
            return self.template.render(**self.variables | values)


def changed(message, change):
    """The message with `change` applied to its texts, such as content and name, but not to its role."""
    texts = {key: change(value) for key, value in message.items() if isinstance(value, str)}
    return message | texts | {"role": message["role"]}


def well_formed(text):
    """Lone surrogates, which UTF-8 cannot carry, become U+FFFD; two halves of a pair become their character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def make_environment():
    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # jinja's own tojson escapes for HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment


class Generation(Extension):
    """{% generation %} ... {% endgeneration %} mark the assistant's text. Here they write what is inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def raise_exception(message):
    raise TemplateError(message)
