"""A process's share of a run's work, for code that does not know how many processes there are.

training/parallel.py has the same for several. Left out: torch.distributed.
"""

from contextlib import nullcontext

from device.kinds import MIB

BUCKET = 25 * MIB  # bytes of small gradients that are copied together and added up in one message


class OneProcess:
    """All of the work is this process's, and nothing has to be exchanged."""

    rank, size, sharded = 0, 1, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def connected(self):
        """A context around the iterations."""
        return nullcontext()

    def device(self, name: str) -> str:
        """The option `device` -> this process's device."""
        return name

    def part(self, n: int) -> slice:
        """Which of n things are this process's."""
        return slice(0, n)

    def gather(self, work) -> list:
        """work() of every process, in order of ranks. If it raises on one, all raise."""
        return [work()]

    def first(self, value):
        """The value that rank 0 gives."""
        return value

    def agreed(self, found):
        """`found` if it is not None, else another process's."""
        return found

    def own(self, batches: list, rank_of: dict, model):
        """The micro-batches of this process. rank_of: number of a sequence -> rank. model: what will run on them."""
        return batches

    def add(self, tensor) -> None:
        """Replace a tensor by its sum over the processes."""

    def add_up(self, model, optimizer, totals: dict) -> dict:
        """Replace the gradients by their sums over the processes -> the sums of `totals`; of names in _max the max."""
        return totals

    def loads_on(self, device):
        """Where a model is made and loaded before `shard`."""
        return device

    def shard(self, model, device):
        """Keep only this process's part of the weights on the device -> the model."""
        return model

    def whole(self, model):
        """A context with a model that has all weights, to sample from."""
        return nullcontext(model)

    def gathered(self, model, tensors: dict) -> dict:
        """{file: {name: tensor}} of runs.loading.tensors_of -> the same with whole tensors; on rank 0 only."""
        return tensors

    def norm(self, own):
        """The norm of all gradients. own: of this process's part of them, a scalar tensor."""
        return own
