"""Runs with a tool and an environment. The model is random: its 20 tokens are such that it often calls, and often fails."""

import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

TAGS = ["<f>", "</f>", "<result>", "</result>"]
STOP = "<|endoftext|>"


def write_tokenizer(folder):
    """Digits, =, ?, a few tags, and nothing else."""
    words = ["[unk]", *"0123456789=?!", *TAGS, " [cut]"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"</?\w+>| \[cut\]|."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([STOP])
    Path(folder).mkdir(parents=True, exist_ok=True)
    backend.save(f"{folder}/tokenizer.json")
    Path(folder, "tokenizer_config.json").write_text(json.dumps(dict(eos_token=STOP)))


def options(home, name, **changes):
    """Options of a run in home/name that takes a second. Most of what it needs is written to `home`."""
    home = Path(home)
    if not (home / "tokenizer").exists():  # one process makes them
        rows = [dict(prompt=f"{a}{b}=", answer=str(a + b), start=a) for a in range(10) for b in range(10)]
        (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_tokenizer(home / "tokenizer")
    common = dict(n_layer=1, n_embd=32, block_size=64, batch_size=4, group_size=4, max_new_tokens=40)
    common |= dict(task="jsonl", data_file=str(home / "prompts.jsonl"), tokenizer=str(home / "tokenizer"))
    common |= dict(device="cpu", max_iters=3, learning_rate=1e-2, eval_prompts=4, eval_interval=0, save_interval=1)
    common |= dict(tools=["agents:f"], environment="agents:Game", max_turns=5, out_dir=str(home / name))
    common |= dict(reward_funcs=["agents:answered"], param_dtype="float32")
    return common | changes


def answered(completions, environments, **columns):
    """1 for a completion in which the tool answered: few, so that groups are refilled. And TRL's arguments."""
    assert len(completions) == len(environments)
    tools = [[message for message in messages if message["role"] == "tool"] for messages in completions]
    return [float(sum("error" not in message["content"] for message in each) > 0) for each in tools]


def long(completions, **columns):
    """What nearly every completion has another value of."""
    return [sum(len(message["content"]) for message in messages) / 100 for messages in completions]


def f(text: str) -> str:
    """Digits of a text.

    Args:
        text: any
    """
    if len(text) % 3 == 0:
        raise ValueError("0")
    return "".join(char for char in text if char.isdigit())[:3]


class Game:
    """Asks once more after the first turn without a call."""

    def reset(self, start, **columns):
        self.start, self.asked = start, False
        return f"{start}?"

    def reply(self, text: str) -> str | None:
        if self.asked:
            return None
        self.asked = True
        return "?"

    def get_reward(self):
        return self.start / 10
