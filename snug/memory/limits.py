"""How much is decoded and trained on at once; less after an out-of-memory error.

    limits.retry("rollout", function)         # after an out-of-memory error calls it again, with less
    limits.retry("train", function, cut)      # function(cut=cut), with micro-batches within the limit

A checkpoint keeps the limits that an out-of-memory error has lowered.
"""

import gc

import torch

from snug.device.cuda import empty_cache
from snug.device.processes import ONE_PROCESS
from snug.device.streams import settle
from snug.options import SnugError, first_line

DECODED = {"rollout": "max_rollout_batch", "eval": "max_eval_batch"}  # phase -> its limit
# Parts of the messages of cuBLAS and hipBLAS, of CUDA's and AMD's driver, of Triton, of a CPU, and of MPS.
MESSAGES = (
    "BLAS_STATUS_ALLOC_FAILED",
    "error: out of memory",
    "]: out of memory",
    "can't allocate memory",
    "MPS backend out of memory",
)


def is_out_of_memory(error: Exception):
    """Did the device or the host run out of memory?"""
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in MESSAGES)


def reference_batches(settings) -> int:
    """How many micro-batches the reference or the teacher takes in one forward: several if weights are copied from the
    host.

    A block should compute for as long as the next block's weights take to arrive: about 8,000 tokens, by estimates for
    several devices. Four micro-batches without backward need about as much memory as one with backward.
    """
    tokens = settings.max_tokens_per_micro_batch
    if not tokens or not settings.streams_weights:
        return 1
    return max(1, min(4, 8192 // tokens))


class Limits:
    """How many completions are decoded at a time, and how many tokens a micro-batch has; 0: all at once.

    max_rollout_batch and max_tokens_per_micro_batch begin as the settings say. max_eval_batch, the limit of
    evaluations, begins with as many completions as a rollout has memory for. In a rollout a group shares its prompt,
    but in an evaluation all prompts are different. An out-of-memory error halves one limit.

        4 prompts of 256 tokens, 4 completions of 1,024 each: (4 * 4 * 256 + 16 * 1,024) // (4 * 256 + 1,024) = 10

    `halved` is what a checkpoint keeps: {name: [the limit at first, the limit now]}.
    """

    def __init__(self, prepared, say, halved=None, processes=ONE_PROCESS):
        """say: reports a change. halved: the checkpoint's; a limit in it holds if the settings begin with the same
        limit."""
        settings = prepared.settings
        self.say, self.halved, self.processes = say, {}, processes
        share = range(settings.batch_size)[processes.part(settings.batch_size)]
        self.completions = len(share) * settings.group_size  # of a rollout, on this process
        self.max_rollout_batch = settings.max_rollout_batch
        rows = min(settings.max_rollout_batch or self.completions, self.completions)
        groups = -(-rows // settings.group_size)
        prompt, completion = prepared.longest()
        prompt *= 4  # a prompt's activations take about three times its place in the cache
        self.max_eval_batch = (groups * prompt + rows * completion) // (prompt + completion)
        self.max_tokens_per_micro_batch = settings.max_tokens_per_micro_batch
        self.reference_batches = reference_batches(settings)
        for name, (began, value) in (halved or {}).items():
            if getattr(self, name) == began:
                self.lower(name, value, "an earlier out-of-memory")

    def retry(self, phase, function, cut=None):
        """function(), or function(cut=cut); after an out-of-memory error in any process all call it again with less.

        phase: the name of a phase, which has a limit: see `make_smaller`. cut: a batch.Cut; the function gets it in
        micro-batches within the limit. The limit is lowered behind the `except` block: there the exception is gone, and
        with it the frames that held the failed call's tensors. Raises SnugError if nothing can be lowered.
        """
        failures = 0
        while True:
            pieces = {} if cut is None else {"cut": cut.with_limit(self.max_tokens_per_micro_batch)}
            result = failure = None
            try:
                result = function(**pieces)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = first_line(error)
            if failure and self.processes.sharded:
                # The other processes wait for this process's part of the weights.
                raise SnugError(
                    f"rank {self.processes.rank} is out of memory: {failure}; "
                    "lower max_tokens_per_micro_batch or max_rollout_batch, with --resume=auto"
                )
            failure = self.processes.agreed(failure)  # or the failure of another process
            if failure is None:
                return result
            failures += 1
            del result
            settle()
            gc.collect()
            empty_cache()
            self.make_smaller(phase, failure, failures, **pieces)

    def make_smaller(self, phase, failure, failures, cut=None):
        """Halve the limit of a phase. failures: how often the phase ran out of memory in a row.

        cut: the batch.Cut that was too large."""
        if phase == "optimizer" and failures == 1:
            return  # an optimizer step has no limit: one more try
        if phase in ("reference", "teacher") and self.reference_batches > 1:
            self.lower("reference_batches", self.reference_batches // 2, failure)
            return
        name, now, least, where = "", 0, 0, "in the optimizer step"
        if phase in DECODED:
            name, least, where = DECODED[phase], 1, "decoding one completion at a time"
            now = min(getattr(self, name) or self.completions, self.completions)
        elif phase != "optimizer":
            name, now, least = "max_tokens_per_micro_batch", cut.largest, cut.longest
            where = f"one sequence of {least} tokens at a time"
        if now <= least:
            raise SnugError(
                f"out of memory, {where}: {failure}; try a lower --max_new_tokens, or --resume=auto with "
                "--memory_budget_gb=auto or a lower one"
            )
        self.lower(name, max(least, -(-now // 2)), failure)

    def lower(self, name, value, failure):
        began = self.halved.get(name, [getattr(self, name)])[0]
        self.halved[name] = [began, value]
        setattr(self, name, value)
        self.say(f"{failure}; going on with {name}={value}")
