"""Chat messages to one text, by the template that a tokenizer comes with.

A template is a program, in jinja: it runs in jinja's sandbox, sees the messages and the names of tokens, and what it writes is what
`transformers` would get. Its loops over ranges may count to 100,000 altogether; other endless work is not stopped: a template is trusted
with time and memory, as the weights are that it comes with.

Special tokens are for the template alone to write. Where a message's content spells one, the template sees a character that is nowhere
else instead; the tokenizer cuts the text at special tokens and puts the spelling back as ordinary text. The text must come out the same as
from the contents as they are; a template that looks into them at such a place is refused.

Left out: tools, documents, contents of several parts (images), other keys of a message than role and content.
"""

import json
from datetime import datetime

import regex
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from options import SnugError

PRIVATE = range(0xF0000, 0xFFFFE)  # characters that mean nothing, a private-use plane


class Chat:
    """source: the template. variables: {"bos_token": "<s>", ...} for it. special: what spells a special token."""

    def __init__(self, source, variables, special):
        self.source, self.variables, self.special, self.template = source, variables, special, None
        self.spellings = regex.compile("|".join(map(regex.escape, special)))
        self.longest = max(map(len, special))
        self.heads = {name[:end] for name in special for end in range(1, len(name))}
        self.tails = {name[start:] for name in special for start in range(1, len(name))}

    def render(self, messages):
        """[{"role": "user", "content": "Hi"}, ...] -> (text, {code of a character in it: the spelling that it stands for}).

        Raises SnugError for messages of another shape, and for a template that fails.
        """
        check(messages, self.spellings)
        now = datetime.now()
        plain = self.run(messages, now)
        marks = Marks(plain, self.source, *self.special, *(message["content"] for message in messages))
        marked = [message | {"content": self.marked(message["content"], marks)} for message in messages]
        if not marks:
            return plain, {}
        text, spelled = self.run(marked, now), {ord(mark): spelling for spelling, mark in marks.items()}
        if text.translate(spelled) != plain:
            raise SnugError(
                f"the chat template looks at {min(marks)!r:.60} in a message, a special token or a part of one; take it out"
            )
        return text, spelled

    def marked(self, content, marks):
        """A content whose spellings of special tokens have become marks; and what is at its ends and could, beside other text,
        become a part of one: "<|im_" and "end|>" in two messages.
        """
        content = self.spellings.sub(lambda found: marks[found.group()], content)
        core = content.strip()
        if not core:
            return content
        before, after = content.split(core, 1)
        if any(core in name for name in self.special):
            return before + marks[core] + after
        head = next((core[:end] for end in range(min(len(core), self.longest), 0, -1) if core[:end] in self.tails), "")
        first = max(len(head), len(core) - self.longest)
        tail = next((core[start:] for start in range(first, len(core)) if core[start:] in self.heads), "")
        core = core[len(head) : len(core) - len(tail)]
        return before + (head and marks[head]) + core + (tail and marks[tail]) + after

    def run(self, messages, now):
        left = MAX_RANGE

        def bounded(*bounds):
            nonlocal left
            left -= len(range(*bounds))
            if left < 0:
                raise OverflowError(f"ranges of more than {MAX_RANGE} numbers altogether")
            return range(*bounds)

        own = dict(range=bounded, strftime_now=now.strftime, raise_exception=raise_exception)
        values = dict(
            messages=[dict(message) for message in messages], tools=None, documents=None, add_generation_prompt=True
        )
        try:
            self.template = self.template or make_environment().from_string(self.source)
            return well_formed(self.template.render(**self.variables | own | values))
        except Exception as error:  # whatever a program may raise
            raise SnugError(
                f"the chat template fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            ) from None


class Marks(dict):
    """spelling -> a character that is in none of the texts, made when it is asked for."""

    def __init__(self, *texts):
        taken = set().union(*texts)
        self.unused = (chr(code) for code in PRIVATE if chr(code) not in taken)

    def __missing__(self, spelling):
        mark = next(self.unused, None)
        if mark is None:
            raise SnugError(
                "a prompt with all private-use characters of Unicode leaves none to mark special tokens with; take some out"
            )
        self[spelling] = mark
        return mark


def well_formed(text):
    """Half a surrogate pair, which UTF-8 cannot carry, becomes U+FFFD; two that belong together are their character."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check(messages, spellings):
    if not isinstance(messages, list) or not messages:
        raise SnugError(f"a prompt must be text or a list of messages, not {messages!r:.60}")
    for message in messages:
        if (
            not isinstance(message, dict)
            or set(message) != {"role", "content"}
            or not all(isinstance(v, str) for v in message.values())
        ):
            raise SnugError(f'a message must be {{"role": text, "content": text}}, not {message!r:.60}')
        role = message["role"]
        if not role.replace("_", "").replace("-", "").isalnum() or not role.isascii() or spellings.search(role):
            raise SnugError(f"a message's role must be a word, such as user, not {role!r:.60}")


def make_environment():
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["namespace"] = Names
    del environment.globals["lipsum"]  # which is random
    return environment


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja's, which answers forbidden attributes with nothing, and so hides that they were asked for; here they are refused."""

    def unsafe_undefined(self, obj, attribute):
        raise SecurityError(f"access to {attribute!r:.60} of a {type(obj).__name__}")


class Names(Namespace):
    """{% set names.last = 1 %}, but for names that Python itself would ask for."""

    def __init__(self, /, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            refuse_private(name)

    def __setitem__(self, name, value):
        refuse_private(name)
        super().__setitem__(name, value)


def refuse_private(name):
    if str(name).startswith("_"):
        raise SecurityError(f"the name {name!r:.60}")


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, around what an assistant said: for us nothing but what is inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """jinja's own writes HTML's special characters as \\u003c."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)
