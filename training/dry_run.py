"""What the planner runs: the loops' own `iterate` on tensors without data, with every length the longest there may be.

The loops do not know of it. Only what needs data has a stand-in: sampling and scoring, SFT's demonstrations, and
evaluations. Of the decode steps the last is taken, when the cache is full; of the micro-batches, all alike, two.
"""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from batch import Sequences
from decoding.decode_batch import Flight, casts_kept, decode_batch
from evaluate import decoding_of
from memory.oom import Pieces
from model import autocast, make_model
from runs.checkpoint import configure
from sample import Rollouts
from settings import GRPOSettings
from training.guard import Guard
from training.optimizer import make_optimizer
from training.state import Prompts, Training


class DryRun:
    """Init and one iteration of a loop, for memory.plan. Called with settings and a depth, because plans of deep models
    are those of shallow ones, continued."""

    def __init__(self, prepared, iterate, make_reference):
        self.prepared, self.iterate, self.make_reference = prepared, iterate, make_reference
        self.n_layer = prepared.shape["n_layer"]

    def __call__(self, settings, n_layer: int, meter):
        device, shape = torch.device("cpu"), self.prepared.shape | {"n_layer": n_layer}
        prompt, completion = self.prepared.longest(settings)
        grpo = isinstance(settings, GRPOSettings)
        # One optimizer step stands for all. Two micro-batches are enough: the second adds to gradients that are there.
        once = replace(settings, train_batch_size=0, num_iterations=1) if grpo else settings
        prepared = replace(self.prepared, settings=once, shape=shape)
        reference = self.make_reference(prepared, device, weights=False)
        meter.label("reference", reference.named_parameters() if reference else ())
        model = configure(make_model(shape, device, settings.param_dtype), settings)
        optimizer = make_optimizer(model, settings)
        meter.label("weights", model.named_parameters())
        log = Silent()
        guard = Guard(settings, prepared.tokenizer, log.say)
        pieces, prompts = Pieces(settings, log.say), Prompts(settings.batch_size)
        training = DryTraining(prepared, model, reference, optimizer, meter, log, guard, None, pieces, prompts)
        count = settings.sequences_per_step
        rows = min(count, 2 * max(1, settings.max_tokens_per_micro_batch // (prompt + completion)))
        rows = rows if settings.max_tokens_per_micro_batch else count

        def worst_case_groups(iteration, training):
            P, k = settings.batch_size, settings.group_size
            sizes = prompt, P, k, completion, settings.max_rollout_batch, settings.logits_chunk_mb
            with meter.phase("rollout"), autocast(settings.dtype, model):
                rounds = [worst_case_rollouts(model, *sizes) for _ in range(settings.max_num_gen_batches)]
                if len(rounds) > 1:  # dynamic sampling holds them all, joins them and selects from them
                    Rollouts.joined(rounds).select(range(P * k))
            rollouts = rounds.pop()
            views = [
                value[:rows] for value in (rollouts.tokens, rollouts.sampling_logprobs, rollouts.mask)
            ]  # all is counted
            learned = Rollouts(views[0], *lengths(rows, prompt, completion), *views[1:], *lengths(rows, True))
            return learned, torch.zeros(rows, 1), [], dict(tokens=0, gen_batches=1)

        def worst_case_batch(iteration, training):
            return Sequences(
                torch.zeros(count, prompt + completion, dtype=torch.long)[:rows], *lengths(rows, prompt, completion)
            )

        self.iterate(0, training, worst_case_groups if grpo else worst_case_batch)


class DryTraining(Training):
    """A Training that evaluates the worst case, and neither logs nor saves."""

    def evaluate_if_due(self, done):
        settings, (prompt, completion) = self.settings, self.prepared.longest(self.settings)
        if done == 0 and settings.eval_prompts:
            decoding = decoding_of(settings, self.pieces)
            with self.meter.phase("eval"), autocast(settings.dtype, self.model):
                worst_case_rollouts(self.model, prompt, settings.eval_prompts, 1, completion, *decoding.values())
        return {}

    def update(self, *args):
        named = self.model.named_parameters()
        self.meter.label("gradients", ((name, p.grad) for name, p in named if p.grad is not None))
        return super().update(*args)

    def end_iteration(self, *args):
        pass


class Silent:
    """In place of a RunLog."""

    def show(self, phase):
        pass

    def say(self, text):
        pass


@torch.no_grad()
def worst_case_rollouts(model, prompt_length, P, k, max_new_tokens, max_batch, chunk_mb) -> Rollouts:
    """What sample_groups allocates at most -> Rollouts in which every length is the longest."""
    slots = decode_batch(P, k, max_batch)
    flight = Flight(model, [[0] * prompt_length] * P, k, max_new_tokens, slots, None, (1.0, chunk_mb))
    with casts_kept(model):
        flight.rehearse()
    tokens, logprobs, N = flight.tokens[:-1], flight.logprobs[:-1], flight.N
    del flight
    whole = torch.zeros(N, prompt_length + max_new_tokens, dtype=torch.long)
    mask = torch.ones_like(tokens)
    return Rollouts(whole, *lengths(N, prompt_length, max_new_tokens), logprobs.clone(), mask, *lengths(N, True))


def lengths(count, *values):
    """Tensors (count,) with data, one a value: micro-batches are cut by numbers."""
    with unset_fake_temporarily():
        return [torch.full((count,), value) for value in values]
