"""After out-of-memory: the same work again, in smaller pieces.

    for attempt in attempts(make_smaller):
        with attempt:
            rollouts = sample_groups(...)

`Limits` knows how large the pieces are, halves them, and says which options would help when they cannot be smaller.
A checkpoint remembers them.
"""

import gc
from copy import copy

import torch

from device.cuda import empty_cache
from device.processes import OneProcess
from device.streams import settle
from memory.fit import CHANGES_ROUNDING, cheaper, written
from options import SnugError, first_line


def is_out_of_memory(error: Exception) -> bool:
    """Did the device run out of memory (on a CPU, the host)? CUDA's libraries have several messages for it."""
    words = ["CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory"]
    words += ["CUDA driver error: out of memory"]
    words += [] if torch.cuda.is_initialized() else ["can't allocate memory"]
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


class Attempt:
    """Swallows an out-of-memory error and keeps its first line in `error`."""

    def __enter__(self):
        self.error = None
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
            return False
        self.error = first_line(error)
        return True


def attempts(make_smaller, agreed=lambda error: error):
    """Yield Attempts until the `with` block of one ends without running out of memory. agreed: OneProcess.agreed.

    In between make_smaller(error) makes the next attempt need less, or raises. By then the exception is gone, and with
    it the frames that held the failed attempt's tensors: so the block should call a function for what is large.
    """
    while True:
        attempt = Attempt()
        yield attempt
        if (error := agreed(attempt.error)) is None:
            return
        settle()
        gc.collect()
        empty_cache()
        make_smaller(error)


def at_once(settings) -> int:
    """How many micro-batches the reference takes at once: several if each forward copies its weights from the host.

    A block should compute for as long as the next one takes to arrive: about 8,000 tokens, by estimates for several
    devices. Without backward four micro-batches need about as much memory as one with it.
    """
    most = settings.max_tokens_per_micro_batch
    if not most or not settings.needs_reference or settings.reference == "device":
        return 1
    return max(1, min(4, 8192 // most))


class Limits:
    """How many completions are decoded at a time, and how many tokens a micro-batch has; 0: all at once.

    max_rollout_batch and max_tokens_per_micro_batch begin as the settings say, max_eval_batch, the limit of
    evaluations, with the smaller of batch_size and max_rollout_batch. An out-of-memory halves the one that it concerns.
    `halved` is what a checkpoint keeps: {name: [how it began, what it is now]}.
    """

    def __init__(self, settings, say, halved=None, processes=None):
        """say: reports a change. halved: the resumed checkpoint's; it holds if the settings ask for the same again."""
        self.settings, self.say, self.halved, self.processes = (
            settings,
            say,
            {},
            processes or OneProcess(),
        )
        self.max_rollout_batch = settings.max_rollout_batch
        self.max_eval_batch = min(
            settings.batch_size, settings.max_rollout_batch or settings.batch_size
        )
        self.max_tokens_per_micro_batch = settings.max_tokens_per_micro_batch
        self.at_once = at_once(settings)  # micro-batches in one forward of the reference
        for name, (began, value) in (halved or {}).items():
            if getattr(self, name) == began:
                self.set(name, value, "an earlier out-of-memory")

    def set(self, name, value, error):
        began = self.halved.get(name, [getattr(self, name)])[0]
        self.halved[name] = [began, value]
        setattr(self, name, value)
        self.say(f"{error}; going on with {name}={value}")

    def attempts(self, make_smaller):
        """`attempts`; after an out-of-memory in one process all use smaller pieces. Raises SnugError if sharded."""

        def agreed(error):
            if error and self.processes.sharded:  # the others wait for its part of the weights
                seen = f"rank {self.processes.rank} is out of memory, which sharded processes cannot repeat: {error}"
                raise SnugError(
                    f"{seen}; lower max_tokens_per_micro_batch or max_rollout_batch, with --resume=auto"
                )
            return self.processes.agreed(error)

        return attempts(make_smaller, agreed)

    def halve_rollout(self, rows: int, model, name="max_rollout_batch"):
        """-> make_smaller for `attempts`: decode half of `rows` completions at a time. Raises SnugError at one."""

        def make_smaller(error):
            now = min(getattr(self, name) or rows, rows)
            if now == 1:
                raise SnugError(self.at_the_floor(f"decoding one completion at a time: {error}", model))
            self.set(name, -(-now // 2), error)

        return make_smaller

    def halve_evaluation(self, model):
        """The same for an evaluation, which decodes one completion of each prompt and has a limit of its own."""
        return self.halve_rollout(self.max_eval_batch, model, "max_eval_batch")

    def halve_micro_batches(self, cut, model):
        """-> make_smaller for `attempts`: half as many tokens in a micro-batch of `cut`, a batch.Cut.

        Raises SnugError where a micro-batch is a single sequence.
        """

        def make_smaller(error):
            if cut.largest <= cut.longest:
                raise SnugError(
                    self.at_the_floor(f"one sequence of {cut.longest} tokens at a time: {error}", model)
                )
            self.set("max_tokens_per_micro_batch", max(cut.longest, cut.largest // 2), error)
            cut.into(self.max_tokens_per_micro_batch)

        return make_smaller

    def joined(self, cut):
        """A batch.Cut for training -> one for the reference, whose micro-batches may be larger."""
        cut = copy(cut)
        cut.into(self.at_once * self.max_tokens_per_micro_batch)
        return cut

    def halve_joined(self, smaller):
        """-> make_smaller for the reference: half as many micro-batches at once; of one, what `smaller` does."""

        def make_smaller(error):
            if self.at_once == 1:
                return smaller(error)
            self.at_once //= 2
            self.say(f"{error}; going on with {self.at_once} micro-batches of the reference at once")

        return make_smaller

    def once_more(self, model):
        """-> make_smaller for an optimizer step, which has no pieces: one more try, with an empty allocator cache."""
        tried = []

        def make_smaller(error):
            if tried or self.processes.sharded:
                raise SnugError(self.at_the_floor(f"in the optimizer step: {error}", model))
            tried.append(error)

        return make_smaller

    def at_the_floor(self, what, model):
        """One line: what failed, and the next option to try."""
        settings = self.settings
        further = [
            c
            for c in cheaper(settings, model.device.type)
            if not set(c) & {"max_rollout_batch", "max_tokens_per_micro_batch"}
        ]
        if further or "float32" in (settings.param_dtype, settings.optimizer_dtype):
            advice = f"{written(further[0] if further else CHANGES_ROUNDING)}, with --resume=auto"
        else:
            advice = "a smaller model, or shorter sequences"
        return f"out of memory, {what}; next: {advice}; --plan shows the biggest tensors"
