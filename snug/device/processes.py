"""A process's share of a run's work. Code that uses it need not know how many processes there are.

training/parallel.py has the same for several. Left out: torch.distributed.
"""

from contextlib import nullcontext

import torch


class OneProcess:
    """The only process of a run: it exchanges nothing. What depends on rank and size alone holds for several, too."""

    rank, local_rank, size, sharded = 0, 0, 1, False

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        """At the end all wait for rank 0's last save."""
        if error is None:
            self.agreed(None)

    def device(self, name):
        """The option `device` -> this process's device."""
        if name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return name

    def part(self, n: int) -> slice:
        """Which of n things are this process's."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def from_all_ranks(self, work) -> list:
        """The results of work() in every process, in order of ranks. If one raises, all raise."""
        return [work()]

    def first(self, value):
        """The value that rank 0 gives."""
        return self.from_all_ranks(lambda: value)[0]

    def agreed(self, value):
        """The value of the first process that has one; None if none has."""
        return next((v for v in self.from_all_ranks(lambda: value) if v is not None), None)

    def dealt(self, batches: list, rank_of: dict, model):
        """The micro-batches that this process runs `model` on. rank_of: number of a sequence -> rank."""
        return [batch for batch in batches if rank_of[batch[0]] == self.rank]

    def add(self, tensor):
        """Replace a tensor by its sum over the processes."""

    def add_up(self, model, optimizer, totals: dict):
        """Replace the gradients by their sums over the processes -> the sums of `totals`; maxima of names in _max."""
        return totals

    def loads_on(self, device):
        """Where a model is made and loaded before `shard`."""
        return device

    def shard(self, model, device):
        """Keep only this process's rows of the weights on the device -> the model."""
        return model

    def whole(self, model):
        """A context that gives a model with all weights, to sample from."""
        return nullcontext(model)

    def whole_tensors(self, tensors):
        """{file: {name: tensor}} of runs.loading.tensors_of -> the same with all rows of each, on rank 0 only."""
        return tensors

    def norm(self, norm):
        """The norm of this process's part of the gradients, a scalar tensor -> the norm of all gradients."""
        return norm


ONE_PROCESS = OneProcess()
