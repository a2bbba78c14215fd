"""Episodes: completions of several turns, which tools or an environment answer while the model samples.

    episodes = Episodes(toolbox, tokenizer, rows, k)
    rollouts = sample_groups(model, ids of episodes.rows, k, respond=episodes.respond, is_over=episodes.is_over, ...)
    completions = episodes.finish(rollouts)

A turn ends with a stop token, a stop string or, inline, the closing tag of a call. If the turn has calls, the tools
answer; otherwise the environment's `reply`, if it has one; otherwise the episode is over. The answer is a message. Its
ids are those that the chat template puts between two turns of the assistant. Without a template for tools, or behind a
prompt of text, the result of a call is written as <result>text</result> right behind it.

With toolbox=None a completion is one turn: `respond` is None and completions are texts. Otherwise they are messages, as
in TRL: {"role": "assistant", "content": text, "tool_calls": [...]}, {"role": "tool", "name": ..., "content": text}.

Nothing is tokenized twice: the ids of a turn stay those that were sampled. So a conversation differs from what the
template would make of all its messages where the template changes earlier turns: Qwen3's drops their thoughts.

Left out: images; environments that differ from row to row. Tests: tests/test_episodes.py.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import add

from data import imported
from data.calls import awaited, blaming
from data.rewards import repeat_columns
from data.task import split_beginning
from data.tools import call_tool, load_tools, methods_of, parse_calls, schema_of, text_within
from snug.options import SnugError, in_one_line, option
from snug.tokenizer.chat import BREAK

CUT = " [cut]"
LONGEST_TOKEN = 32  # characters; encoding 10 MB would take long


@dataclass
class EpisodeOptions:
    """How a completion ends. Tools and environments, which the model calls while it samples: they are TRL's, and run in
    this process.
    """

    stop_string: str = option("", "text that also ends a completion, such as </answer>")
    tools: list[str] = option(
        [], "functions that the model may call: module:function, such as examples.tools:calc"
    )
    environment: str = option("", "module:Class; its public methods are tools")
    max_turns: int = option(0, "turns of the model in a completion; 0: no limit")
    max_tool_tokens: int = option(256, "cut off longer results of tools", minimum=1)
    tool_timeout: float = option(10.0, "seconds of a call; then the model reads an error", minimum=1e-3)


class Toolbox:
    """What the model may call: functions, and the environments with their methods. Raises SnugError."""

    def __init__(self, settings: EpisodeOptions, tokenizer, functions):
        """functions: tools that are not imported, by their names in the settings."""
        self.settings, self.tokenizer = settings, tokenizer
        self.functions = load_tools(settings.tools, functions, settings.out_dir)
        self.make_environment, self.environments = type(None), []
        if settings.environment:
            self.make_environment = imported(
                settings.environment, "environment", "my_game:Game", functions, settings.out_dir
            )
        methods = methods_of(self.some_environments(1)[0])
        for name in methods.keys() & self.functions.keys():
            raise SnugError(
                f"tools: environment={settings.environment} has a method {name}, too; rename one"
            )
        self.schemas = list(map(schema_of, [*self.functions.values(), *methods.values()]))
        if tokenizer.chat:
            tokenizer.chat.tools = self.schemas or None

    def some_environments(self, n: int) -> list:
        """They are made once and reset for each episode, as in TRL. Without a class: None each."""
        with in_one_line(f"environment={self.settings.environment}: cannot be made"):
            while len(self.environments) < n:
                self.environments.append(self.make_environment())
        return self.environments[:n]

    def reward_functions(self) -> list[Callable]:
        """The environment's get_reward as a reward function, if it has one."""
        kind = type(self.environments[0])
        if not hasattr(kind, "get_reward"):
            return []

        def rewards(environments, **columns):
            return [awaited(environment.get_reward()) for environment in environments]

        rewards.__name__ = kind.__name__
        return [rewards]


def make_toolbox(settings, tokenizer, functions: Mapping = {}) -> Toolbox | None:
    """None if the settings name no tool and no environment."""
    return Toolbox(settings, tokenizer, functions) if settings.tools or settings.environment else None


class Episode:
    """One completion: its messages so far, and what was counted."""

    def __init__(self, toolbox: Toolbox, row: dict, environment):
        self.toolbox, self.tokenizer, self.environment = toolbox, toolbox.tokenizer, environment
        self.functions = toolbox.functions | methods_of(environment)
        self.row, self.prompt = row, row["prompt"]
        is_text = isinstance(self.prompt, str) or not toolbox.schemas
        self.form = "inline" if is_text else self.tokenizer.chat.call_form
        self.messages, self.turns = [], 0
        self.sampled = 0  # tokens that are in the messages
        self.written = 0  # tokens of answers
        self.tool_errors = 0
        if environment is not None and (text := self.of_environment("reset", row)):
            self.prompt = extended(self.prompt, text, self.tokenizer.spellings)
        self.begun = split_beginning(self.prompt)[1]  # until the first turn is in the messages

    def of_environment(self, name: str, arguments: dict) -> str | None:
        """What `reset` or `reply` returns. Raises SnugError if it fails."""
        limit, kind = self.toolbox.settings.tool_timeout, type(self.environment).__name__
        with blaming(
            f"environment {kind}.{name}",
            f"tool_timeout={limit:g}",
            f"it gets {', '.join(arguments)}",
        ):
            return text_within(getattr(self.environment, name), arguments, limit)

    def respond(self, ids: list[int]) -> list[int] | None:
        """ids of a turn that ended -> ids of the answer; None: the episode is over."""
        self.listen(ids)
        turn = self.messages[-1]
        if self.turns == self.toolbox.settings.max_turns:
            return None
        answers = [self.result_of(call) for call in turn.get("tool_calls", ())]
        if not answers and hasattr(self.environment, "reply"):
            text = self.of_environment("reply", dict(text=turn["content"]))
            answers = [dict(role="user", content=self.shortened(text))] if text else []
        if not answers:
            return None
        self.messages += answers
        answer = self.encode(answers, ids[-1] in self.tokenizer.stop_tokens)
        self.written += len(answer)
        return answer

    def listen(self, ids):
        """Add a turn to the messages."""
        text = self.begun + self.tokenizer.decode(ids)
        thinks = self.form != "inline" and not self.begun and self.tokenizer.chat.thinks
        self.begun = ""
        content, calls = parse_calls(text, self.form, self.toolbox.schemas, thinks)
        turn = dict(role="assistant", content=content)
        self.messages.append(turn | dict(tool_calls=calls) if calls else turn)
        self.turns += 1
        self.sampled += len(ids)

    def result_of(self, call) -> dict:
        """The message with which a tool answers a call."""
        text, failed = call_tool(self.functions, call, self.toolbox.settings.tool_timeout)
        self.tool_errors += failed
        return dict(role="tool", name=call["function"]["name"], content=self.shortened(str(text)))

    def shortened(self, text: str) -> str:
        """At most max_tool_tokens tokens of it."""
        most = self.toolbox.settings.max_tool_tokens
        begin = text[: most * LONGEST_TOKEN]
        ids = self.tokenizer.encode(begin)
        if begin == text and len(ids) <= most:
            return text
        return self.tokenizer.decode(ids[:most]) + CUT

    def encode(self, answers: list[dict], stopped: bool) -> list[int]:
        text = answers[0]["content"]
        if self.form == "inline" and answers[0]["role"] == "tool":  # of the one call of the turn
            return self.tokenizer.encode(f"<result>{text}</result>")
        if isinstance(self.prompt, str):
            return self.tokenizer.encode(text)
        return self.tokenizer.encode_reply(answers, stopped)

    def finish(self, sampled: list[int], written: int):
        """sampled: all ids that the model sampled. written: how many were written. Completes the messages."""
        if written < self.written:  # there was no room for the last answer
            while self.messages[-1]["role"] != "assistant":
                self.messages.pop()
        if self.sampled < len(sampled):  # a turn that was cut off
            self.listen(sampled[self.sampled :])


class Episodes:
    """The completions of `rows`, k of each prompt. N = len(rows) * k. Raises SnugError.

    rows, k: prompts with the environments' first texts, and how many completions share each; if these texts differ
    within a group, N rows and 1. respond and is_over are for sample_groups. prompts: N, as reward functions get them,
    without the beginnings of answers, which belong to the completions.
    """

    def __init__(
        self, toolbox: Toolbox | None, tokenizer, rows: list[dict], k: int, stop_string: str = ""
    ):
        self.rows, self.k, self.tokenizer = rows, k, tokenizer
        self.episodes, self.respond = [], None
        stops = [stop_string]
        if toolbox:
            repeated = [row for row in rows for _ in range(k)]
            environments = toolbox.some_environments(len(repeated))
            self.episodes = list(map(partial(Episode, toolbox), repeated, environments))
            own = [episode.row | dict(prompt=episode.prompt) for episode in self.episodes]
            same = all(row["prompt"] == own[i - i % k]["prompt"] for i, row in enumerate(own))
            self.rows, self.k = (own[::k], k) if same else (own, 1)
            self.respond = lambda row, ids: self.episodes[row].respond(ids)
            if any(episode.form == "inline" for episode in self.episodes):
                stops += [f"</{schema['function']['name']}>" for schema in toolbox.schemas]
        self.is_over = tokenizer.stopper(stops)
        pairs = [split_beginning(unbroken(row["prompt"])) for row in self.rows for _ in range(self.k)]
        self.prompts, self.begun = zip(*pairs, strict=True)

    def finish(self, rollouts) -> list[str] | list[list[dict]]:
        """-> N completions: texts, or messages if there is a toolbox."""
        if not self.episodes:
            return list(map(add, self.begun, map(self.tokenizer.decode, rollouts.completions())))
        for episode, ids, mask in zip(
            self.episodes, rollouts.completions(), rollouts.mask.tolist(), strict=True
        ):
            sampled = list(compress(ids, mask))
            episode.finish(sampled, len(ids) - len(sampled))
        return [episode.messages for episode in self.episodes]

    def columns(self, rollouts) -> dict[str, list]:
        """What reward functions get beside prompts and completions; as TRL the environments, after their episodes."""
        columns = repeat_columns(self.rows, self.k)
        columns |= dict(stopped=rollouts.stopped.tolist(), completion_ids=rollouts.completions())
        if self.episodes and self.episodes[0].environment is not None:
            columns["environments"] = [episode.environment for episode in self.episodes]
        return columns

    def figures(self) -> dict[str, list]:
        """{name: a value for each completion}, for logs. Empty without a toolbox."""
        names = ("messages", "tool_errors") if self.episodes else ()
        return {name: [getattr(episode, name) for episode in self.episodes] for name in names}


def extended(prompt: str | list[dict], text: str, spellings):
    """A prompt with a text behind it, in its last message before an answer.

    Special tokens that a prompt of text spells are read. Those of the text are not: they get breaks, as in messages.
    """
    if isinstance(prompt, str):
        return prompt + spellings.sub(lambda found: BREAK.join(found[0]), text)
    *before, last = prompt
    if last["role"] == "assistant":
        return [*extended(before, text, spellings), last]
    return [*before, last | dict(content=last["content"] + text)]


def unbroken(prompt):
    return prompt.replace(BREAK, "") if isinstance(prompt, str) else prompt


def as_text(messages: list[dict]) -> str:
    """An episode as a person reads it: a turn, below it its calls and the answers, then the next turn."""
    lines = []
    for message in messages:
        who = message.get("name", message["role"])
        lines.append(message["content"] if who == "assistant" else f"  {who}: {message['content']}")
        for call in message.get("tool_calls", ()):
            lines.append(
                f"  -> {call['function']['name']}({json.dumps(call['function']['arguments'])})"
            )
    return "\n".join(filter(None, lines))
