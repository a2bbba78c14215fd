"""What the planner runs: the `iterate` of a loop, on tensors without data, with the longest possible sequences.

The loops do not know that they are planned. Only what needs data has a stand-in: sampling and scoring, SFT's
demonstrations, and evaluations. The stand-ins run the last decode step, when the cache is full, and two micro-batches,
as full as possible.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from batch import Sequences
from model import autocast, make_model
from runs.loading import configure, load_reference, load_teacher
from runs.log import NoLog
from sample import Rollouts
from settings import GRPOSettings
from snug.decoding import DecodeBatch, cached_casts
from snug.kernels.layers import hold_in_nf4
from snug.kernels.nf4 import quantize
from snug.memory.ledger import component
from snug.memory.limits import Limits, reference_batches
from training.figures import Scored
from training.optimizer import make_optimizer
from training.state import Training


class DryRun:
    """Init and one iteration of a loop, for memory.plan: dry_run(settings, n_layer, meter).

    The depth is an argument because a deep model's plan is extrapolated from the plans of two shallow models.
    """

    def __init__(self, prepared, iterate):
        self.prepared, self.iterate = prepared, iterate
        self.n_layer = prepared.shape["n_layer"]
        self.period = prepared.shape.get("full_every") or 1
        self.longest = prepared.longest()  # tokens of the longest prompt and completion

    def __call__(self, settings, n_layer, meter):
        device, shape = torch.device("cpu"), self.prepared.shape | {"n_layer": n_layer}
        settings, one_step, worst_case = share_of(settings), {}, worst_case_batch
        if isinstance(settings, GRPOSettings):  # one step stands for all
            one_step, worst_case = dict(train_batch_size=0, num_iterations=1), worst_case_groups
        prepared = replace(self.prepared, settings=replace(settings, **one_step), shape=shape)
        # Before the phase begins: until a model is moved to the host or to NF4, its tensors count as the device's.
        reference, teacher = load_reference(prepared, device), load_teacher(prepared, device)
        model = make_model(shape, device, settings.param_dtype)
        if settings.base_dtype:
            hold_in_nf4(model, device)
        with meter.phase("load"):
            torch.empty(0)  # a phase without any tensor has no peak
            if settings.base_dtype:
                # The largest matrix while it is rounded from float32 to 4 bits, beside all others.
                quantize(torch.empty(model.blocks[0].mlp.up.weight.shape))
            configure(model, settings)
            optimizer = make_optimizer(model, settings)
        for name, each in dict(reference=reference, teacher=teacher, weights=model).items():
            if each:
                meter.label(name, each.named_parameters())
        log = NoLog(settings)
        training = DryTraining(
            prepared,
            model,
            reference,
            optimizer,
            meter,
            log,
            None,  # saves nothing
            Limits(prepared, log.say),
            teacher,
        )
        training.begin_iteration(0)
        self.iterate(0, training, partial(worst_case, settings))


def share_of(settings):
    """The settings of a run that is as large as one process's share of this run."""
    n = settings.num_processes
    share = {name: math.ceil(getattr(settings, name) / n) for name in ("batch_size", "eval_prompts")}
    if isinstance(settings, GRPOSettings):  # whole groups are dealt
        groups = math.ceil(settings.sequences_per_step / (n * settings.group_size))
        share["train_batch_size"] = groups * settings.group_size
    return replace(settings, **share)


@component("rollouts")
def worst_case_groups(settings, iteration, training):
    """In place of grpo.collect_groups: completions of the longest length, and rewards."""
    prompt, completion = training.prepared.longest()
    if settings.environment:  # each completion may have its own prompt
        settings = replace(settings, batch_size=settings.sequences_per_rollout, group_size=1)
    k = settings.group_size
    with training.meter.phase("rollout"):
        rounds = [
            training.rollouts(settings.batch_size, k, settings.max_rollout_batch)
            for _ in range(settings.max_num_gen_batches)
        ]
        if len(rounds) > 1:  # dynamic sampling holds all rollouts, joins them and selects from them
            Rollouts.joined(rounds).select(range(settings.sequences_per_rollout))
    rollouts, lengths = rounds.pop(), fullest_micro_batches(settings, prompt, completion)
    n = len(lengths)
    rows = slice(n) if n <= len(rollouts.tokens) else torch.arange(n) % len(rollouts.tokens)
    learned = Rollouts(
        rollouts.tokens[rows],
        *columns(*zip(*lengths, strict=True)),
        rollouts.sampling_logprobs[rows],
        None,  # all are sampled
        *columns([True] * n),
    )
    scored = Scored(
        learned,
        rewards=torch.zeros(n // k, k),
        by_function={"": [0.0] * n},
        columns={},
        metrics={},
        episodes={},
        shared=k,
    )
    return scored, {}


@component("rollouts")
def worst_case_batch(settings, iteration, training):
    """In place of train_sft.demonstrations."""
    prompt, completion = training.prepared.longest()
    lengths = fullest_micro_batches(settings, prompt, completion)
    tokens = torch.zeros(settings.batch_size, prompt + completion, dtype=torch.long)
    rows = torch.arange(len(lengths)) % len(tokens)
    return Sequences(tokens[rows], *columns(*zip(*lengths, strict=True)))


def fullest_micro_batches(settings, prompt: int, completion: int) -> list[tuple[int, int]]:
    """(prompt, completion) lengths of sequences that fill two micro-batches, or the reference's largest forward.

    Two micro-batches are enough for training: the second adds to gradients that are there, as all later ones do. Both
    are full, even if a step has fewer tokens than two full ones: which of them is not full depends on the groups. A
    micro-batch has as many groups of the longest sequences as there is room for, and one group in what is left.
    """
    left = settings.tokens_per_step(prompt, completion)
    budget = max(prompt + completion - 1, min(left, settings.max_tokens_per_micro_batch or left))
    if left > budget:
        left = max(left, 2 * budget)
    lengths = []
    for _ in range(max(2, reference_batches(settings))):
        room = min(budget, left)
        left -= room
        while room:
            prompt_length = min(prompt, room)
            room -= prompt_length
            for _ in range(settings.group_size):
                inputs = min(completion - 1, room)  # the last token of a completion is not in the row
                room -= inputs
                lengths.append((prompt_length, inputs + 1))
    return lengths


class DryTraining(Training):
    """A Training that evaluates the worst case, and neither logs nor saves."""

    def evaluate_if_due(self, done):
        if done == 0 and self.settings.eval_prompts:
            with self.meter.phase("eval"):
                self.rollouts(self.settings.eval_prompts, 1, self.limits.max_eval_batch)
        return {}

    @component("rollouts")
    @torch.no_grad()
    def rollouts(self, P, k, max_batch):
        """Allocate the most that sample_groups may allocate -> Rollouts of the longest lengths."""
        prompt, completion = self.prepared.longest()
        N = P * k
        options = dict(chunk_mb=self.settings.logits_chunk_mb, ask=self.prepared.toolbox)
        prompts = [[0] * prompt] * P
        with autocast(self.settings.dtype, self.model), cached_casts(self.model):
            batch = DecodeBatch(self.model, prompts, k, completion, max_batch, **options)
            batch.rehearse()
        tokens, logprobs = batch.tokens[:-1], batch.logprobs[:-1]
        del batch
        return Rollouts(
            torch.zeros(N, prompt + completion, dtype=torch.long),
            *columns([prompt] * N, [completion] * N),
            logprobs.clone(),
            torch.ones_like(tokens),
            *columns([True] * N),
        )

    def take_step(self, *args):
        named = self.model.named_parameters()
        self.meter.label("gradients", ((name, p.grad) for name, p in named if p.grad is not None))
        return super().take_step(*args)

    def samples(self, *args):
        return []


def columns(*values):
    """Lists -> tensors with data: lengths are read when micro-batches are cut."""
    with unset_fake_temporarily():
        return [torch.tensor(value) for value in values]
