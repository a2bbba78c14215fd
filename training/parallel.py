"""Several processes that train one model, each on a device of its own: what they share and what they exchange.

    torchrun --nproc_per_node=8 grpo.py config/grpo_small.py --parallel=ddp

Each process samples and scores some of the groups. Then all exchange completions and rewards, so that what follows from
them (advantages, refills, learning rate, what is skipped or dropped) is computed alike everywhere and needs no message.
A step's micro-batches are dealt by tokens (batch.py). Each process adds up its own gradients, which are shares of the
whole step's, and the sum over the processes is the gradient that one process would have.

Why not the class DistributedDataParallel: it averages, wants equally many forwards everywhere, and its hooks do not see
the gradients that the head and the embedding write in place.

This is the only file that knows torch.distributed. Left out: starting processes, and ending them if one dies: torchrun
does both. Tests: tests/test_parallel.py. docs/scaling.md: how to use it.
"""

import atexit
import os
import socket
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from memory import MIB, OneProcess
from options import SnugError, first_line
from runs.loading import trained
from sample import Rollouts
from training.optimizer import gradients_of

BUCKET = 64 * MIB  # bytes of small gradients that are copied together and added up in one message
# torchrun ends all processes if one dies. Until then they wait: for a slow reward function, a save, an evaluation.
PATIENCE = timedelta(days=7)


def start(settings) -> OneProcess:
    """The processes of this run. Raises SnugError if the option and torchrun do not fit together."""
    size, launched = int(os.environ.get("WORLD_SIZE", 1)), "WORLD_SIZE" in os.environ
    if settings.parallel == "none":
        if size > 1:
            raise SnugError(f"parallel='none', but {size} processes were started; add --parallel=ddp")
        return OneProcess()
    if not launched:
        command = f"torchrun --nproc_per_node=8 {sys.argv[0]}"
        raise SnugError(f"parallel={settings.parallel!r} needs processes; start them with {command}")
    if settings.batch_size < size:
        raise SnugError(f"batch_size={settings.batch_size} is less than {size} processes; each takes a prompt at least")
    return Processes(settings)


class Processes(OneProcess):
    """This process among the others: what torchrun has put into the environment, and torch.distributed."""

    def __init__(self, settings):
        self.rank, self.size, self.local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self.settings = settings

    def device(self, name):
        return f"cuda:{self.local}" if name in ("auto", "cuda") and torch.cuda.is_available() else name

    def __enter__(self):
        """Connect with the others. Only rank 0 writes to the console, except errors."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=PATIENCE)
            atexit.register(dist.destroy_process_group)
        if self.rank:
            sys.stdout = open(os.devnull, "w")
            sys.stderr.isatty = lambda: False  # no progress bars
        self.homes = self.gather(lambda: (socket.gethostname(), os.getpid()))
        return self

    def __exit__(self, kind, error, traceback):
        """At the end all wait for rank 0's last save."""
        if error is None:
            self.agreed(None)

    @contextmanager
    def connected(self):
        """What torch.distributed raises if a process ends becomes a SnugError that names it."""
        try:
            yield
        except RuntimeError as error:
            if "gloo" not in str(error) and not isinstance(error, dist.DistError):
                raise
            lost = f"rank {self.rank} lost {self.who_is_gone()}, which torchrun reports below"
            advice = "--resume=auto goes on from the newest checkpoint"
            raise SnugError(f"{lost}; {advice} ({first_line(error)})") from None

    def who_is_gone(self) -> str:
        """Which processes of this host have ended, or that one has."""
        for _ in range(20):  # torchrun looks every 0.1 s
            here = [(rank, pid) for rank, (host, pid) in enumerate(self.homes) if host == self.homes[self.rank][0]]
            if gone := [f"rank {rank}" for rank, pid in here if not runs(pid)]:
                return ", ".join(gone)
            time.sleep(0.1)
        return "another process"

    def part(self, n):
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def gather(self, work):
        result = error = None
        try:
            result = work()
        except SnugError as raised:
            error = str(raised)
        found = [None] * self.size
        dist.all_gather_object(found, (result, error))
        for rank, (_, message) in enumerate(found):
            if message and self.rank in (0, rank):
                raise SnugError(f"rank {rank}: {message}")
            if message:
                sys.exit(2)
        return [value for value, _ in found]

    def first(self, value):
        return self.gather(lambda: value)[0]

    def agreed(self, found):
        return next((value for value in self.gather(lambda: found) if value is not None), None)

    def own(self, batches, rank_of, model):
        return [batch for batch in batches if rank_of[batch[0]] == self.rank]

    def add(self, tensor):
        dist.all_reduce(tensor)

    def add_up(self, model, optimizer, totals):
        for name in trained(model).keys() - gradients_of(model, optimizer).keys():  # no micro-batch was this process's
            trained(model)[name].grad = torch.zeros_like(trained(model)[name])
        for bucket in _take_tensors(gradients_of(model, optimizer).values(), BUCKET):
            flat = _flatten_dense_tensors(bucket)  # of one tensor: the tensor itself
            dist.all_reduce(flat)
            for gradient, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(total)
        return merged(self.gather(lambda: totals))


def merged(shares: list[dict]) -> dict:
    """Metrics of each process -> their sums; of those named _max the largest."""
    names = dict.fromkeys(name for share in shares for name in share)
    values = {name: [share[name] for share in shares if name in share] for name in names}
    return {name: max(found) if name.endswith("_max") else sum(found) for name, found in values.items()}


def runs(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def score_together(processes, score, rollouts, rows, prepared):
    """Each process scores its own completions -> (Rollouts, rewards (P, k), {function: answers}, samples) of all."""
    if processes.size == 1:
        return rollouts, *score(rollouts, rows, prepared)
    device = rollouts.tokens.device
    shares = processes.gather(lambda: (moved(rollouts, "cpu"), *score(rollouts, rows, prepared)))
    parts, rewards, answers, samples = zip(*shares, strict=True)
    answers = {name: [answer for its in answers for answer in its[name]] for name in answers[0]}
    samples = [sample for its in samples for sample in its][: prepared.settings.samples_per_iteration]
    return moved(Rollouts.joined(list(parts)), device), torch.cat(rewards), answers, samples


def moved(rollouts: Rollouts, device) -> Rollouts:
    values = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
    return Rollouts(**{name: None if value is None else value.to(device) for name, value in values.items()})
