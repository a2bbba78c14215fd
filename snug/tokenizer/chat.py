"""Chat messages to one text, by the jinja template that a tokenizer comes with.

The template runs in jinja's sandbox, sees the messages and the names of tokens, and writes the same text as in
`transformers`. A template that never ends is not stopped.

Only the template may write special tokens. If a message's text spells a special token, BREAK is put between its
characters. So every special token that the rendered text spells is the template's. BREAK is a lone surrogate, which no
other text has. A tool's result may spell <tool_response> and the like, which may be tokens that are not special. Then
CUT is put behind the "<", and the texts before and behind CUT are encoded one by one.

Left out: documents, images; breaks in the tool_calls of a message; texts that a template joins into a special token.
Tests: tests/test_tokenizer.py.
"""

import json
import re
from contextlib import suppress
from datetime import date
from functools import cache, cached_property, partial

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from snug.options import SnugError, in_one_line, well_formed

BREAK, CUT = "\udffe", "\udffd"
DAY = date(2024, 7, 26)  # the day in Llama 3.2's template if there is no clock; prompts stay the same
FRAME = re.compile("<(?=/?(tool_response|tool_call|think)>)")
# A turn of the assistant that other messages answer. END is a lone surrogate too, so no other text has it.
END = "\udfff"
TURN = (dict(role="user", content="x"), dict(role="assistant", content=END))

# {% generation %} ... {% endgeneration %} mark the assistant's text. Here only what is inside is written.
GENERATION = re.compile(r"({%-?\s*(?:end)?)generation(?=\s*-?%})")
CALL = dict(
    role="assistant",
    content="",
    tool_calls=[dict(id="call00000", function=dict(name="probe", arguments=dict(key="5")))],
)
FORMS = {  # what a template writes for CALL
    "hermes": r'<tool_call>\s*{[^<]*"probe"[^<]*}\s*</tool_call>',
    "xml": r"<tool_call>\s*<function=probe>\s*<parameter=key>\s*5\s*</parameter>\s*</function>\s*</tool_call>",
    "llama": r'\s{"name": "probe", "parameters": ',
}


class Chat:
    """source: the template. names: {"bos_token": "<s>", ...}, its variables. spellings: of special tokens, a pattern.

    tools: JSON schemas of functions (data/tools.py) that the template describes to the model; None: no tools.
    """

    def __init__(self, source: str, names: dict, spellings):
        self.source, self.tools, self.spellings = source, None, spellings
        self.variables = dict(raise_exception=raise_exception, strftime_now=DAY.strftime) | names

    def set_defaults(self, variables):
        """Values of the template's variables, where the caller gives none. They become part of `source`.

        Raises SnugError for a variable that the template does not have.
        """
        defaults = ""
        for name, value in variables.items():
            if not re.search(rf"\b{re.escape(name)}\b", self.source):
                raise SnugError(
                    f"chat_template_kwargs: the chat template has no variable {name!r:.60}; leave it out"
                )
            defaults += (
                f"{{%- if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}\n"
            )
        if not self.source.startswith(defaults):  # a resumed run's template has them already
            self.source = defaults + self.source

    @cached_property
    def call_form(self) -> str:
        """The form in which the model, like the template, writes calls of tools: hermes, xml, llama or
        inline (data/tools.py).

        Raises SnugError for another form.
        """
        if not re.search(r"\btools\b", self.source):
            return "inline"
        text = self.render([TURN[0], CALL], opens=False)
        for form, pattern in FORMS.items():
            if re.search(pattern, text):
                return form
        # SmolLM3's template only describes calls.
        if "probe" not in text and "<tool_call>" in self.source:
            return "hermes"
        raise SnugError(
            f"tools: snug cannot read the chat template's calls, which end with {text[-60:]!r}; leave out --tools "
            "and --environment, or use prompts of text"
        )

    @cached_property
    def thinks(self) -> bool:
        """Does a prompt end within a thought?"""
        return self.render([TURN[0]]).rstrip().endswith("<think>")

    @cached_property
    def end(self) -> str | None:
        """The first special token that the template writes behind an answer, if there is one."""
        with suppress(SnugError, TypeError):
            return self.spellings.search(self.render([], TURN, opens=False))[0]

    def render(self, messages, before=(), opens=True):
        """[{"role": "user", "content": "Hi"}, ...] -> what the template writes, with BREAK where a message spells a
        special token.

        before=TURN: only what the template writes behind END. opens: with the beginning of an answer. If the last
        message is the assistant's, this message is the beginning (transformers' continue_final_message). Raises
        SnugError for a template that fails.
        """
        if self.tools and opens:
            _ = self.call_form  # raises SnugError for a form that snug cannot read
        messages, begun = [*before, *map(self.broken, messages)], ""
        goes_on = opens and messages[-1]["role"] == "assistant"
        if goes_on:
            begun = messages[-1]["content"]
            messages[-1]["content"] += END + " "
        with in_one_line("the chat template fails"):
            text = compiled(self.source).render(
                self.variables,
                messages=messages,
                tools=self.tools,
                documents=None,
                add_generation_prompt=opens and not goes_on,
            )
        head, end, tail = text.rpartition(END)
        if (before or goes_on) and not end or begun.strip() not in head:
            raise SnugError("the chat template fails (it leaves out a message)")
        if goes_on:  # a template may strip contents
            return head if tail.startswith(" ") else head.rstrip()
        return tail

    def broken(self, message) -> dict:
        """The message with breaks in its texts, such as content and name."""
        broken = {
            key: self.spellings.sub(lambda found: BREAK.join(found[0]), well_formed(value))
            for key, value in message.items()
            if isinstance(value, str)
        }
        if message["role"] == "tool":
            broken = {key: FRAME.sub("<" + BREAK + CUT, text) for key, text in broken.items()}
        return message | broken


@cache
def compiled(source):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # jinja's own tojson escapes for HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(GENERATION.sub(r"\1with", source))


def raise_exception(message):
    raise TemplateError(message)
