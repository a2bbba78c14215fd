"""What the planner runs: the loops' own `iterate` on tensors without data, with every length the longest there may be.

The loops do not know of it. Only what needs data has a stand-in: sampling and scoring, SFT's demonstrations, and
evaluations. Of the decode steps the last is taken, when the cache is full; of the micro-batches two, as full as can be.
"""

from dataclasses import replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from batch import Sequences
from decoding import DecodeBatch, cached_casts
from memory.limits import Limits, reference_batches
from model import autocast, make_model
from runs.loading import configure
from runs.log import NoLog
from sample import Rollouts
from settings import GRPOSettings
from training.guard import Guard
from training.optimizer import make_optimizer
from training.state import PromptCursor, Training


class DryRun:
    """Init and one iteration of a loop, for memory.plan: dry_run(settings, n_layer, meter).

    The depth is an argument because the plan of a deep model continues those of two shallow ones.
    """

    def __init__(self, prepared, iterate, make_reference):
        self.prepared, self.iterate, self.make_reference = prepared, iterate, make_reference
        self.n_layer = prepared.shape["n_layer"]

    def __call__(self, settings, n_layer: int, meter):
        device, shape = torch.device("cpu"), self.prepared.shape | {"n_layer": n_layer}
        settings, grpo = share_of(settings), isinstance(settings, GRPOSettings)
        once = (
            replace(settings, train_batch_size=0, num_iterations=1) if grpo else settings
        )  # one step stands for all
        prepared = replace(self.prepared, settings=once, shape=shape)
        reference = self.make_reference(prepared, device, weights=False)
        meter.label("reference", reference.named_parameters() if reference else ())
        model = configure(make_model(shape, device, settings.param_dtype), settings)
        optimizer = make_optimizer(model, settings)
        meter.label("weights", model.named_parameters())
        log = NoLog(settings)
        guard = Guard(settings, log.say)
        limits, cursor = Limits(settings, log.say), PromptCursor(settings.batch_size)
        training = DryTraining(
            prepared, model, reference, optimizer, meter, log, guard, None, limits, cursor
        )
        worst_case = partial(worst_case_groups if grpo else worst_case_batch, settings)
        self.iterate(0, training, worst_case)

    def units(self, settings) -> tuple[int, int]:
        """-> bytes of the weights outside the blocks, and of a block: what a sharded run gathers at a time."""
        model = make_model(self.prepared.shape | {"n_layer": 1}, "meta", settings.param_dtype)
        block, whole = (sum(p.nbytes for p in part.parameters()) for part in (model.blocks, model))
        return whole - block, block


def share_of(settings):
    """The settings of a run as large as one process's share of this run."""
    n = settings.num_processes
    if n == 1:
        return settings
    share = {name: -(-getattr(settings, name) // n) for name in ("batch_size", "eval_prompts")}
    if isinstance(settings, GRPOSettings):  # whole groups, as they are dealt
        share["train_batch_size"] = (
            -(-settings.sequences_per_step // (n * settings.group_size)) * settings.group_size
        )
    return replace(settings, **share)


def worst_case_groups(settings, iteration, training):
    """In place of grpo.collect_groups: completions of the longest length, rewards without variance."""
    prompt, completion = training.prepared.longest(settings)
    sizes = prompt, settings.batch_size, settings.group_size, completion
    limits = settings.max_rollout_batch, settings.logits_chunk_mb
    with training.meter.phase("rollout"), autocast(settings.dtype, training.model):
        rounds = [
            worst_case_rollouts(training.model, *sizes, *limits)
            for _ in range(settings.max_num_gen_batches)
        ]
        if len(rounds) > 1:  # dynamic sampling holds them all, joins them and selects from them
            Rollouts.joined(rounds).select(range(settings.sequences_per_rollout))
    rollouts, lengths = rounds.pop(), fullest_micro_batches(settings, prompt, completion)
    n = len(lengths)
    rows = slice(n) if n <= len(rollouts.tokens) else torch.arange(n) % len(rollouts.tokens)
    tokens, logprobs, mask = (
        x[rows] for x in (rollouts.tokens, rollouts.sampling_logprobs, rollouts.mask)
    )
    learned = Rollouts(
        tokens, *columns(*zip(*lengths, strict=True)), logprobs, mask, *columns([True] * n)
    )
    return (
        learned,
        torch.zeros(n // settings.group_size, settings.group_size),
        dict(tokens=0, gen_batches=1),
    )


def worst_case_batch(settings, iteration, training):
    """In place of train_sft.demonstrations."""
    prompt, completion = training.prepared.longest(settings)
    lengths = fullest_micro_batches(settings, prompt, completion)
    tokens = torch.zeros(settings.batch_size, prompt + completion, dtype=torch.long)
    return Sequences(
        tokens[torch.arange(len(lengths)) % len(tokens)], *columns(*zip(*lengths, strict=True))
    )


def fullest_micro_batches(settings, prompt: int, completion: int) -> list[tuple[int, int]]:
    """(prompt, completion) lengths of sequences that fill two micro-batches, or those that the reference takes at once.

    Two are enough for training: the second adds to gradients that are there, as all later ones do. Both are full, even
    where a step has less than two: which one is not full depends on the groups. As many groups of the longest as there
    is room for, and one group of what remains.
    """
    k, left = settings.group_size, settings.tokens_per_step(prompt, completion)
    budget = max(prompt + completion - 1, min(left, settings.max_tokens_per_micro_batch or left))
    left = max(left, 2 * budget) if left > budget else left
    found = []
    for _ in range(max(2, reference_batches(settings))):
        room = min(budget, left)
        left -= room
        while room:
            p = min(prompt, room)
            room -= p
            for _ in range(k):
                own = min(completion - 1, room)
                room -= own
                found.append((p, own + 1))
    return found


class DryTraining(Training):
    """A Training that evaluates the worst case, and neither logs nor saves."""

    def evaluate_if_due(self, done):
        settings, (prompt, completion) = self.settings, self.prepared.longest(self.settings)
        if done == 0 and settings.eval_prompts:
            decoding = self.limits.max_eval_batch, settings.logits_chunk_mb
            with self.meter.phase("eval"), autocast(settings.dtype, self.model):
                worst_case_rollouts(self.model, prompt, settings.eval_prompts, 1, completion, *decoding)
        return {}

    def update(self, *args):
        named = self.model.named_parameters()
        self.meter.label("gradients", ((name, p.grad) for name, p in named if p.grad is not None))
        return super().update(*args)

    def samples(self, *args):
        return []

    def end_iteration(self, *args):
        pass


@torch.no_grad()
def worst_case_rollouts(model, prompt_length, P, k, max_new_tokens, max_batch, chunk_mb) -> Rollouts:
    """What sample_groups allocates at most -> Rollouts in which every length is the longest."""
    N = P * k
    batch = DecodeBatch(
        model, [[0] * prompt_length] * P, k, max_new_tokens, min(max_batch or N, N), chunk_mb=chunk_mb
    )
    with cached_casts(model):
        batch.rehearse()
    tokens, logprobs = batch.tokens[:-1], batch.logprobs[:-1]
    del batch
    whole = torch.zeros(N, prompt_length + max_new_tokens, dtype=torch.long)
    lengths = columns([prompt_length] * N, [max_new_tokens] * N)
    return Rollouts(whole, *lengths, logprobs.clone(), torch.ones_like(tokens), *columns([True] * N))


def columns(*values) -> list[torch.Tensor]:
    """Lists -> tensors with data: lengths are read when micro-batches are cut."""
    with unset_fake_temporarily():
        return [torch.tensor(value) for value in values]
