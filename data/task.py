"""Tasks: what a model is asked, and whether it answered rightly. One file a task.

A task is problems without end: row 17 of a split is computed from the number 17 (or looked up: jsonl, gsm8k), so there is nothing to
download, to shuffle or to remember. Which split a problem belongs to is a property of the problem itself: a hash of what identifies
it, so that no training prompt is ever a test prompt, whatever the seed. "tune" is a third split, a tenth of the training problems: with
eval_split=tune a run leaves them out and is evaluated on them, so that settings can be chosen without a look at the test.

    task = make_task(settings)
    rows = task.prompts("train", range(0, 64))
    text = task.demonstration(rows[0], rng)
    task.rewards([row["prompt"] for row in rows], completions, answer=[row["answer"] for row in rows])
    task.answer_of(completions[0])

A prompt is text, or, with settings.chat, a list of messages, [{"role": "user", "content": text}]. Completions are text, and untrusted
input: a task reads them by a whitelist, bounds their length first, and never evaluates them.

Left out: conversations of several turns, rewards by another model (write a function: `load_reward_function`).
"""

import random
import zlib

from options import SnugError

TEST_SHARE = 10  # one problem in ten is held out, and another while settings are chosen


SURVEY = 2_000  # proposals that make_task looks at, and


SURVEY_HITS = 10  # how many of them each split needs, so that


MAX_PROPOSALS = (
    20_000  # proposals find a row for every index: at a rate of 10 in 2,000 they miss with probability 1e-43
)


MARGIN = 16  # tokens; see `longest`


class Task:
    """A kind of problem. A subclass knows how to propose one, what identifies it, how it is demonstrated and scored."""

    columns = ()  # the columns of a row that `is_right` reads, in its order

    def __init__(self, settings):
        self.seed, self.tuning = settings.seed, settings.eval_split == "tune"
        self.demonstration_noise = settings.demonstration_noise
        self.chat, self.system_prompt = settings.chat, settings.system_prompt
        self.format_reward = settings.format_reward

    # What a subclass writes

    def propose(self, rng):
        """A random problem: a row, {"prompt": text, column: value, ...}; or None where chance led nowhere."""
        raise NotImplementedError

    def identity(self, row):
        """The text that decides the row's split, the same for problems that are the same to a learner (1+2, 2+1)."""
        raise NotImplementedError

    def demonstration(self, row, rng):
        """A completion to learn from, without a stop token; it errs with probability demonstration_noise. rng: random.Random."""
        raise NotImplementedError

    def is_right(self, completion, *columns):
        """Does this text, written by a model, answer the problem? Must be quick and safe for every text."""
        raise NotImplementedError

    def answer_of(self, completion):
        """What votes are counted by: the completion's answer in one spelling, a text; None where it gives none. Quick and safe too.

        Of completions of one problem with the same answer, all are right or none is.
        """
        return completion.strip() or None

    def reward_functions(self):
        """What a run is rewarded by, where it names no functions of its own: [(function, weight)]. Each is called as `rewards` is."""
        return [(self.rewards, 1.0)]

    def longest_prompt(self):
        """A prompt, in ASCII, that no other is longer than. Its length bounds every prompt's tokens, for no token is less
        than a byte; its own tokens do not, for a tokenizer that merges: gpt2 reads 9999 as one token and 6025 as two.
        """
        raise NotImplementedError

    def longest_answer(self):
        """A text, in ASCII, that no demonstration is longer than; bounds tokens as `longest_prompt` does."""
        raise NotImplementedError

    scored = True  # can it say whether a completion is right?

    def fingerprint(self):
        """Of the data that the task was read from, so that a resumed run does not go on with other data; "" where there is none."""
        return ""

    # What it gets

    def longest(self, encode):
        """Bounds on the tokens of a prompt and of a demonstration. encode: text or messages -> ids.

        Texts are bounded by their bytes, which `longest_prompt` says more about, and messages by their contents' bytes and what the
        template adds to an x. Beside another text than x the template's own words may be cut into more tokens: those that touch it, "user\\n"
        or " [/INST]", for special tokens end what is cut. They have fewer than MARGIN bytes, and no token less than one.
        Tasks that know all their texts encode them instead.
        """
        prompt, answer = (len(text.encode()) for text in (self.longest_prompt(), self.longest_answer()))
        return prompt + (len(encode(self.asked("x"))) + MARGIN if self.chat else 0), answer

    def prompts(self, split, index):
        """Rows number `index` (an iterable of ints) of "train", "tune" or "test": a list of dicts, each with its "prompt".

        A row depends on the task's options, the split, its number and, for train alone, settings.seed: runs with
        different seeds practise different problems and are compared on the same ones. Rows may repeat.
        """
        rows = [self.row(split, int(number)) for number in index]
        return [row | {"prompt": self.asked(row["prompt"])} for row in rows]

    def asked(self, prompt):
        """A row's prompt as a run asks it: text as it is, or, with settings.chat, messages."""
        return prompt if isinstance(prompt, str) and not self.chat else as_messages(prompt, self.system_prompt)

    def row(self, split, number):
        stream = {"train": f"train {self.seed}", "tune": "tune", "test": "test"}[split]
        rng = random.Random(f"{type(self).__name__} {stream} {number}")
        for _ in range(MAX_PROPOSALS):
            row = self.propose(rng)
            if row and self.belongs(self.identity(row), split):
                return row
        raise SnugError(
            f"task {type(self).__name__.lower()}: no {split} prompt in {MAX_PROPOSALS:,} tries; loosen its options"
        )

    def belongs(self, identity, split):
        found = split_of(identity)
        return found == split or (split == "train" and found == "tune" and not self.tuning)

    def rewards(self, prompts, completions, **columns):
        """1.0 for each right completion, 0.0 for each other, and for one that did not stop: a list of floats.

        Called as TRL calls reward functions: prompts (texts or messages) and completions (texts) are lists, columns lists of the
        same length, named as in the rows. `stopped`, a list of bools, says which completions ended with the stop token
        (missing: all did). Columns that the task does not know are ignored.
        """
        stopped = columns.get("stopped", [True] * len(completions))
        known = [columns[name] for name in self.columns]
        return [
            float(bool(ended) and self.is_right(completion, *values))
            for completion, ended, *values in zip(completions, stopped, *known, strict=True)
        ]

    def in_parts(self):
        """For `reward_functions` of a task that wants its answers in a form: what the log shows apart, reward/correct and reward/formatted."""
        return [(self.correct, 1.0), (self.formatted, self.format_reward)]

    def correct(self, prompts, completions, **columns):
        return self.rewards(prompts, completions, **columns)

    def formatted(self, prompts, completions, **columns):
        """1.0 for each completion that stopped and gives an answer, right or wrong, in the form that is read; 0.0 for each other."""
        stopped = columns.get("stopped", [True] * len(completions))
        return [
            float(bool(ended) and self.answer_of(text) is not None)
            for text, ended in zip(completions, stopped, strict=True)
        ]

    def survey(self):
        """Raises SnugError where the options leave a split (nearly) empty, before anything else is done."""
        rng = random.Random(f"{type(self).__name__} survey")
        rows = [row for row in (self.propose(rng) for _ in range(SURVEY)) if row]
        for split in ("train", "tune", "test") if self.tuning else ("train", "test"):
            hits = sum(self.belongs(self.identity(row), split) for row in rows)
            if hits < SURVEY_HITS:
                raise SnugError(
                    f"task {type(self).__name__.lower()}: its options leave too few {split} prompts ({hits} in {SURVEY:,} tries); loosen them"
                )


def split_of(identity):
    """-> "train", "tune" or "test", by the text's CRC-32, which unlike hash() is the same in every process."""
    return {0: "test", 1: "tune"}.get(zlib.crc32(identity.encode()) % TEST_SHARE, "train")


def as_messages(prompt, system_prompt=""):
    """Text -> messages, the system's before the user's. A prompt that is messages already gets the system's if it has none."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages
