"""Conversations with tools: templates, a model that answers by a script, and calls."""

import json
from collections import Counter

import torch

import sample
from helpers.models import CHATML, make_flat_model
from helpers.tokenizers import HERMES, LLAMA31, llama3_like, qwen_like
from sample import sample_groups
from snug.decoding import decode_batch


def tool_of(name, function, **hints):
    """-> the function with this name and these hints; each argument is described."""
    function.__name__, function.__annotations__ = name, hints
    function.__doc__ = "Do it.\n\nArgs:\n" + "".join(f"    {argument}: of it\n" for argument in hints)
    return function


# name: tokenizer, template, the token that ends a turn
CHATS = dict(hermes=(qwen_like, HERMES, "<|im_end|>"), llama=(llama3_like, LLAMA31, "<|eot_id|>"))
CHATS |= dict(inline=(qwen_like, CHATML, "<|im_end|>"))


WIDE = 4096  # more than the tokens of any completion


class Script:
    """In place of drawing, each row says its turns. turns[row]: lists of ids; behind the last one a row says token 0."""

    def __init__(self, monkeypatch, turns):
        self.turns, self.now, self.begin = turns, Counter(), Counter()
        monkeypatch.setattr(sample, "uniforms", lambda seed, rows, columns: (rows[:, None] * WIDE + columns) * 1.0)
        monkeypatch.setattr(decode_batch, "sample_tokens", self.draw)

    def draw(self, model, hidden, u, **options):
        tokens = [self.token(*divmod(int(number), WIDE)) for number in u.tolist()]
        tokens = torch.tensor(tokens, dtype=torch.long, device=hidden.device)
        return tokens, -torch.ones(len(tokens), device=hidden.device)

    def token(self, row, t):
        ids = self.turns[row][self.now[row]] if self.now[row] < len(self.turns[row]) else []
        place = t - self.begin[row]
        return ids[place] if 0 <= place < len(ids) else 0

    def follow(self, respond):
        def answer(row, ids):
            reply = respond(row, ids)
            self.begin[row] += len(ids) + len(reply or [])
            self.now[row] += 1
            return reply

        return respond and answer

    @classmethod
    def follow_episodes(cls, monkeypatch, turns):
        """The completions of the next `sample_episodes` have these turns."""
        script = cls(monkeypatch, turns)

        def scripted(*args, respond, **options):
            return sample_groups(*args, respond=script.follow(respond), **options)

        monkeypatch.setattr(sample, "sample_groups", scripted)


def says(tokenizer, *texts):
    """The ids of turns that end with a stop token."""
    return [[*tokenizer.encode(text), tokenizer.stop_token] for text in texts]


def sampled(monkeypatch, tokenizer, episodes, turns, longest):
    """-> Rollouts of these Episodes. turns: of each row, texts or lists of ids."""
    model = make_flat_model("gpt2", n_layer=1, vocab_size=tokenizer.n_vocab, block_size=WIDE)
    turns = [[says(tokenizer, turn)[0] if isinstance(turn, str) else turn for turn in row] for row in turns]
    script = Script(monkeypatch, turns)
    prompts = [tokenizer.encode_prompt(row["prompt"]) for row in episodes.rows]
    stops = dict(stop_token=tokenizer.stop_tokens, is_over=episodes.is_over)
    k = len(turns) // len(prompts)
    return sample_groups(model, prompts, k, longest, respond=script.follow(episodes.respond), **stops)


def call(name, **arguments):
    return dict(type="function", function=dict(name=name, arguments=arguments))


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps(dict(name=name, arguments=arguments), ensure_ascii=False)}\n</tool_call>"
