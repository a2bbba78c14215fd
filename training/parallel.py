"""Several processes that train one model, each on its device: what they share and what they exchange.

    torchrun --nproc_per_node=8 grpo.py config/grpo_small.py --parallel=ddp

Each process samples and scores some of the groups. Then all exchange completions and rewards. Every process computes
the rest alike, without messages: advantages, refills, learning rate, what is skipped or dropped. A step's micro-batches
are dealt by tokens (batch.py). The gradients of a process are shares of the whole step's gradients, so the sum over all
processes is the gradient that a single process would have.

The class DistributedDataParallel does not fit: it averages, it needs equally many forwards in every process, and its
hooks do not see the gradients that the head and the embedding write in place.

This is the only file that knows torch.distributed. Left out: starting processes, and ending them if one dies: torchrun
does both. Tests: tests/test_parallel.py. docs/scaling.md: how to use it.
"""

import atexit
import os
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from model import GPT
from runs.loading import configure
from snug.device.kinds import wide
from snug.device.processes import ONE_PROCESS, OneProcess
from snug.lora import trained
from snug.options import SnugError, in_one_line
from training.figures import join, moved, score
from training.optimizer import PIECE, gradients_of

# torchrun ends all processes if one dies. Until then they wait: for a slow reward function, a save, an evaluation.
PATIENCE = timedelta(days=7)


def start(settings) -> OneProcess:
    """The processes of this run. Raises SnugError if the option and torchrun do not fit together."""
    size, together = int(os.environ.get("WORLD_SIZE", 0)), settings.parallel != "none"
    if size == 0 if together else size > 1:  # 0: without torchrun
        raise SnugError(
            f"parallel={settings.parallel!r} and {size} processes of torchrun do not fit; start several with "
            f"torchrun --nproc_per_node=8 {sys.argv[0]} --parallel=ddp"
        )
    if not together:
        return ONE_PROCESS
    settings.num_processes = size
    settings.check()
    return (Processes if settings.parallel == "ddp" else ShardedProcesses)(settings)


class Processes(OneProcess):
    """This process among the others: what torchrun has put into the environment, and torch.distributed."""

    def __init__(self, settings):
        self.rank, self.size, self.local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        self.settings = settings

    def __enter__(self):
        """Connect with the others. Only rank 0 writes to the console, except errors."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=PATIENCE)
            atexit.register(dist.destroy_process_group)
        if self.rank:
            sys.stdout = open(os.devnull, "w")
        return self

    def from_all_ranks(self, work):
        result = error = None
        try:
            result = work()
        except SnugError as raised:
            error = raised
        everyones = [None] * self.size
        with in_one_line("the processes cannot exchange data; torchrun says why"):
            dist.all_gather_object(everyones, (result, error))
        for rank, (_, error) in enumerate(everyones):
            if error and self.rank not in (0, rank):
                sys.exit(2)
            if error:
                error.args = (f"rank {rank}: {error}",)
                raise error  # with its notes
        return [result for result, _ in everyones]

    def add(self, tensor):
        dist.all_reduce(tensor)

    def add_up(self, model, optimizer, totals):
        gradients = gradients_of(model, optimizer)
        for name, p in trained(model).items():
            if name not in gradients:  # this process had no micro-batch
                p.grad = torch.zeros_like(p)
        for gradient in gradients_of(model, optimizer).values():
            for piece in gradient.view(-1).split(PIECE):
                total = piece.to(wide(piece.dtype))
                dist.all_reduce(total)
                piece.copy_(total)  # rounded once
        return merged(self.from_all_ranks(lambda: totals))


class ShardedProcesses(Processes):
    """FSDP2: each process keeps some rows of every weight, of its gradient and of its moments.

    A block's weights are gathered while it runs. Embedding, last norm and head are one more unit. They stay gathered
    from forward to backward, because the head runs outside the model. The in-place gradients land on the gathered
    weights, like any other. FSDP adds up and distributes the gradients after each micro-batch, so no device has all of
    them. The optimizer works on `model.shards`, plain tensors with this process's rows.
    """

    sharded = True

    def loads_on(self, device):
        return torch.device("cpu")  # a whole model need not fit on the device

    def shard(self, model, device):
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
        )

        if model is None:
            return None
        settings = self.settings
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise SnugError(
                f"parallel='fsdp' needs torch 2.13, not {torch.__version__}; update it, or use --parallel=ddp"
            )
        # No block's output is changed in place while gradients are on.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        reduce_dtype = None if settings.param_dtype == "float64" else torch.float32
        options = dict(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        if settings.param_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for module in [*model.blocks, model]:
            fully_shard(module, **options)
            # A sum, because our gradients are shares of the whole step's.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        model.set_reduce_scatter_unused_params(True)  # the filler of `dealt` does not reach the head
        model.shards, model.rows, model.runs_on = {}, {}, device
        for name, p in model.named_parameters():
            if p.requires_grad:
                model.shards[name] = torch.nn.Parameter(p.to_local().detach())
                first = min(-(-len(p) // self.size) * self.rank, len(p))  # as torch.chunk deals rows
                model.rows[name] = slice(first, first + len(model.shards[name]))
        return model

    def dealt(self, batches, rank_of, model):
        """A forward gathers weights from all processes, so all run equally many; fillers are tokens without a loss."""
        dealt = super().dealt(batches, rank_of, model)
        most = max(Counter(rank_of[batch[0]] for batch in batches).values(), default=0)
        yield from dealt
        for _ in range(most - len(dealt)):
            hidden = model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
            if torch.is_grad_enabled():
                (hidden.sum() * 0).backward()

    def add_up(self, model, optimizer, totals):
        """FSDP has added up the gradients; they move to the shards."""
        for name, p in model.named_parameters():
            if p.grad is not None:
                model.shards[name].grad, p.grad = p.grad.to_local(), None
        return merged(self.from_all_ranks(lambda: totals))

    def norm(self, norm):
        squares = norm.double() ** 2
        dist.all_reduce(squares)
        return squares.sqrt().to(norm.dtype)

    @contextmanager
    def whole(self, model):
        """A plain model of gathered weights: the sampler's CUDA graphs see no hooks."""
        for module in [*model.blocks, model]:
            module.reshard()
        with torch.device("meta"):
            plain = configure(GPT(model.config), self.settings)
        for name, p in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            weight = p.detach().to(model.device).full_tensor()
            setattr(plain.get_submodule(module), leaf, torch.nn.Parameter(weight, requires_grad=False))
        yield plain

    def whole_tensors(self, tensors):
        files = {file: {} for file in tensors}
        for file, named in tensors.items():
            for name, rows in named.items():
                shards = self.from_all_ranks(rows.cpu)
                if not self.rank:
                    files[file][name] = torch.cat(shards)
        return files


def merged(shares: list[dict]):
    """Metrics of each process -> their sums; the largest, if the name ends with _max."""
    totals = {}
    for name in dict.fromkeys(name for share in shares for name in share):
        values = [share[name] for share in shares if name in share]
        totals[name] = max(values) if name.endswith("_max") else sum(values)
    return totals


def score_together(processes, rollouts, episodes, prepared):
    """Each process scores its completions -> Scored of all of them."""
    device, here = rollouts.tokens.device, moved(rollouts, "cpu")
    together = join(processes.from_all_ranks(lambda: score(here, episodes, prepared)))
    return together._replace(rollouts=moved(together.rollouts, device))
