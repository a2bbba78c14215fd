"""Cached, grouped, ragged generation against `generate_naive`, and what a row may depend on."""

import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sample
from helpers.models import DEVICE, make_flat_model, make_model
from helpers.rollouts import assert_naive, rows_of
from model import autocast
from model import make_model as make_gpt
from runs import loading
from sample import sample_groups
from settings import GRPOSettings, SampleSettings, SFTSettings
from snug.decoding import decode_batch as batch
from snug.device.kinds import PlanningMode
from snug.memory.meter import MemoryMeter
from snug.memory.plan import Recorder
from snug.options import SnugError
from snug.tokenizer import get_tokenizer
from training.dry_run import DryTraining

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
STOP = 3


def look_at_every_step(monkeypatch, every=1, leave=1 / 4):
    """Rows that are over are seen at every step, or every so many, and slots leave soon, on CUDA too."""
    for setting, value in ((batch.LOOK_EVERY, every), (batch.SHRINK_AT, leave), (batch.SHRINK_ABOVE, 1)):
        monkeypatch.setitem(setting, DEVICE, value)


@pytest.mark.parametrize(
    "shape, own",
    [
        ("gpt2", dict(temperature=0.0)),
        ("gpt2", dict(temperature=0.7)),
        ("llama", dict(stop_token=(STOP, 9))),
        ("llama", dict(stop_token=(STOP, 9), is_over=lambda ids: ids[-2:] == [5, 5])),
        ("linear", dict(stop_token=(STOP, 9), is_over=lambda ids: ids[-2:] == [5, 5])),
    ],
)
def test_equals_the_naive_generator(shape, own):
    model, options = make_flat_model(shape), dict(stop_token=STOP, seed=4) | own
    rollouts = sample_groups(model, PROMPTS, 6, 12, **options)
    assert_naive(rollouts, model, PROMPTS, 12, **options)
    assert rollouts.completions() == [ids for ids, _ in rows_of(rollouts)]
    ends = {ids[-1] for ids in rollouts.completions()}
    assert len(set(rollouts.completion_lengths.tolist())) > 3 or "temperature" in own  # ragged completions were tested
    assert {STOP, 9} <= ends or "temperature" in own


@pytest.mark.parametrize("shape, sizes", [("gpt2", (4,)), ("llama", (6, 13)), ("linear", (5,))])
def test_a_row_does_not_depend_on_neighbours_or_on_max_batch(shape, sizes):
    """Nor on the order of the queue: each prompt by itself, two rows at a time."""
    model, options = make_flat_model(shape), dict(stop_token=STOP, seed=5)
    whole = rows_of(sample_groups(model, PROMPTS, 6, 10, **options))
    others = [rows_of(sample_groups(model, PROMPTS, 6, 10, max_batch=size, **options)) for size in sizes]
    alone = []
    for p, prompt in enumerate(PROMPTS):
        alone += rows_of(sample_groups(model, [prompt], 6, 10, first_row=6 * p, max_batch=2, **options))
    for rows in (*others, alone):
        for (ids, logprobs), (expected_ids, expected) in zip(rows, whole, strict=True):
            assert ids == expected_ids and logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("shape, temperature", [("gpt2", 1.0), ("llama", 0.0)])
def test_padded_ids_are_never_sampled(shape, temperature):
    """A head with 8 padded rows that would win everywhere is the head without them, in both generators."""
    model, padded = make_flat_model(shape), make_flat_model(shape, vocab_size=24, n_vocab=16)
    weights = model.state_dict()
    with torch.no_grad():
        for name, weight in padded.state_dict().items():
            weight[: len(weights[name])] = weights[name]
            if len(weight) == 24:
                weight[16:] = 50.0
    options = dict(temperature=temperature, stop_token=STOP, seed=11)
    ours, theirs = (sample_groups(m, PROMPTS, 5, 12, **options) for m in (padded, model))
    for (ids, logprobs), (expected_ids, expected) in zip(rows_of(ours), rows_of(theirs), strict=True):
        assert ids == expected_ids and logprobs == pytest.approx(expected, abs=1e-5)
    assert_naive(ours, padded, PROMPTS, 12, **options)
    assert padded.logits(torch.ones(32, device=DEVICE))[16:].isneginf().all()


@pytest.mark.parametrize("every, max_batch", [(1, 3), (4, None)])
def test_a_stop_string_that_spans_tokens(every, max_batch, monkeypatch):
    """Where "ab" has come to its end: in two tokens, in one, or within one. The columns say where everything is."""
    model = make_flat_model("gpt2")
    text = dict.fromkeys((5, 9, 11, 13), "a") | dict.fromkeys((6, 10, 12, 14), "b") | {0: "ab", 8: "xab y"}
    monkeypatch.setitem(batch.LOOK_EVERY, DEVICE, every)

    def is_over(ids):
        return "ab" in "".join(text.get(i, "-") for i in ids)

    options = dict(stop_token=STOP, seed=4, is_over=is_over)
    rollouts = sample_groups(model, PROMPTS, 8, 14, max_batch=max_batch, **options)
    kinds = set()
    assert_naive(rollouts, model, PROMPTS, 14, **options)
    for i, (ids, _) in enumerate(rows_of(rollouts)):
        by_text = is_over(ids)
        assert bool(rollouts.stopped[i]) == (by_text or ids[-1] == STOP)
        assert rollouts.completions()[i] == ids
        p, n, row = int(rollouts.prompt_lengths[i]), len(ids), rollouts.tokens[i].tolist()
        assert row[:p] == PROMPTS[i // 8] and set(row[p + n :]) <= {0} and STOP not in ids[:-1]
        assert rollouts.mask[i].tolist() == [1] * n + [0] * (rollouts.mask.shape[1] - n)  # the stop token is in
        values = rollouts.sampling_logprobs[i]
        assert (values[:n] < 0).all() and (values[n:] == 0).all()
        kinds.add("token" if ids[-1] == STOP else (text[ids[-1]] if by_text else "cut off"))
    assert kinds >= {"token", "b", "ab", "xab y"}
    without = sample_groups(model, PROMPTS, 8, 14, stop_token=STOP, seed=4)
    assert without.completion_lengths.sum() > rollouts.completion_lengths.sum()


def test_a_prompt_goes_through_the_model_once_and_rows_that_are_over_leave(monkeypatch):
    model, seen = make_flat_model("gpt2"), []
    look_at_every_step(monkeypatch)
    eager = dict(stop_token=STOP, enforce_eager=True)  # a graph's replay calls no hooks
    model.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    lengths = sample_groups(model, PROMPTS, 8, 20, **eager | {"stop_token": (9, STOP)}, seed=1).completion_lengths
    assert seen[0] == (4, 7)  # 4 prompts, not 32 rows
    assert len(seen) == int(lengths.max())  # the first tokens come from the prompts
    for t, (n, width) in enumerate(seen[1:], start=1):
        running = int((lengths > t).sum())
        assert width == 1 and running <= n <= max(running / 0.75, running + 1)  # gone, or soon
    model_that_stops = make_model("gpt2")
    with torch.no_grad():
        model_that_stops.embedding.weight.zero_()
        model_that_stops.norm.weight.zero_()
        model_that_stops.norm.bias.fill_(1.0)
        model_that_stops.embedding.weight[STOP] = 9.0
    seen.clear()
    model_that_stops.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    assert sample_groups(model_that_stops, PROMPTS, 8, 20, **eager).completion_lengths.tolist() == [1] * 32
    assert seen == [(4, 7)]


def test_sampled_frequencies_are_the_models():
    """Pearson's chi-square of first and second tokens against the softmax, 20,000 rows."""
    temperature = 0.7
    model = make_model("gpt2", vocab_size=13)
    rollouts = sample_groups(model, [[1, 2]], 20_000, 2, temperature=temperature, seed=3)
    first, second = rollouts.tokens[:, 2], rollouts.tokens[:, 3]

    @torch.no_grad()
    def softmax_after(ids):
        logits = model.logits(model(torch.tensor([ids], device=DEVICE))[0, -1])
        return torch.softmax(logits.double() / temperature, -1)

    p = softmax_after([1, 2])
    assert chi_square(first, p) < 40  # 12 degrees of freedom: exceeded once in 14,000 tries
    likeliest = int(p.argmax())
    after = softmax_after([1, 2, likeliest])
    assert chi_square(second[first == likeliest], after) < 40
    assert chi_square(first, p.roll(1)) > 100  # the test can fail


def chi_square(tokens, p):
    expected = p * len(tokens)
    return float(((torch.bincount(tokens, minlength=len(p)) - expected) ** 2 / expected).sum())


def test_head_in_pieces_is_the_head():
    model = make_model("llama")
    whole = sample_groups(model, PROMPTS, 4, 8, seed=2)
    pieces = sample_groups(model, PROMPTS, 4, 8, seed=2, chunk_mb=0.002)
    assert whole.tokens.equal(pieces.tokens)
    torch.testing.assert_close(whole.sampling_logprobs, pieces.sampling_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("slots, every", [(5, 1), (16, 4)])
def test_freed_slots_are_filled_again(slots, every, monkeypatch):
    """The steps are those of the sum of lengths, not of the longest times the batches. Lengths: geometric, over 40."""
    model, steps = make_flat_model("gpt2", block_size=112, bias=True), []
    stops_one_time_in(12, model)
    look_at_every_step(monkeypatch, every)
    read = []
    model.register_forward_pre_hook(lambda _, args: (read if args[0].shape[1] > 1 else steps).append(len(args[0])))
    prompts = [prompt + [9] for prompt in PROMPTS * 8]  # of two tokens at least
    options = dict(seed=2, max_batch=slots, enforce_eager=True)  # a graph's replay calls no hooks
    rollouts = sample_groups(model, prompts, 10, 100, stop_token=STOP, **options)
    lengths, taken = rollouts.completion_lengths, list(steps)
    assert sum(read) == 32  # each prompt once
    assert rollouts.completions() == sample_groups(model, prompts, 10, 100, stop_token=STOP, seed=2).completions()
    assert lengths.min() == 1 and lengths.max() > 40  # of 320 rows 10 are that long on average
    assert max(taken) <= slots
    assert len(taken) <= 1.15 * int(lengths.sum()) / slots + int(lengths.max())


def test_plain_torch_is_not_recorded():
    """Its lengths and addresses are the host's; a graph would keep those of the step it was made from."""
    for dtype in (torch.float32, torch.float64):
        plain = batch.DecodeBatch(make_model("gpt2").to(dtype), PROMPTS, 2, 8, 4, STOP, cuda_graphs=True)
        kernels = DEVICE == "cuda" and dtype == torch.float32 and plain.cache.kernel
        assert bool(plain.recorder) == kernels


REHEARSED = [(10, 9, 16, "float32"), (1, 40, 16, "bfloat16"), (4, 16, None, "float32"), (8, 8, 8, "bfloat16")]
REHEARSED = [("gpt2", *each) for each in REHEARSED] + [("linear", *each) for each in REHEARSED[::3]]


def test_fewer_completions_at_a_time_make_prefills_smaller_on_a_gpu():
    """16 prompts of 2,048 tokens with 8 completions each. The last out-of-memory in a prefill is that of one prompt."""
    with PlanningMode("cuda", Recorder()):
        model = make_gpt(dict(n_layer=1, n_embd=32, n_head=2, vocab_size=8, block_size=4096), "cpu")
        batches = [batch.DecodeBatch(model, [[1] * 2048] * 16, 8, 64, most) for most in (128, 64, 32, 16, 8, 1)]
    assert [each.prompts_at_once for each in batches] == [8, 8, 4, 2, 1, 1]


@pytest.mark.skipif(DEVICE != "cpu", reason="counts a CPU's bytes")
@pytest.mark.parametrize("shape, k, P, slots, dtype", REHEARSED)
def test_no_lengths_take_more_than_is_rehearsed(shape, k, P, slots, dtype):
    """Refills, slots that leave, and prompts of all lengths, to the last column of the cache."""
    gpt2 = shape == "gpt2"
    model = make_flat_model(shape, block_size=62, bias=gpt2, vocab_size=16 if gpt2 else 40)
    if gpt2:
        stops_one_time_in(25, model)
    prompts = [[1] * (1 + 7 * i % 12) for i in range(P)]

    def peak(call):
        with MemoryMeter(DEVICE) as meter, autocast(dtype, model):
            result = call()
            return meter.figures()["peak"], result

    prepared = SimpleNamespace(longest=lambda: (12, 50), toolbox=None)
    planner = SimpleNamespace(model=model, settings=GRPOSettings(dtype=dtype), prepared=prepared)
    planned, _ = peak(lambda: DryTraining.rollouts(planner, P, k, slots))
    taken, rollouts = peak(lambda: sample_groups(model, prompts, k, 50, stop_token=STOP, seed=1, max_batch=slots))
    assert planned / 2 < taken <= planned and rollouts.completion_lengths.max() > (49 if gpt2 else 40)


def stops_one_time_in(mean, model):
    """The first coordinate of the last norm's output becomes a constant 10, and STOP alone looks at it."""
    with torch.no_grad():
        model.norm.weight[0], model.norm.bias[0] = 0, 10
        model.embedding.weight[:, 0], model.embedding.weight[STOP] = 0, 0
        logits = model.logits(model(torch.randint(5, 12, (8, 20), device=DEVICE)))
        logits[..., STOP] = -torch.inf
        model.embedding.weight[STOP, 0] = (logits.logsumexp(-1).mean() - np.log(mean - 1)) / 10


def test_bad_prompts_are_named():
    model = make_model()
    with pytest.raises(ValueError, match="no tokens"):
        sample_groups(model, [[1], []], 2, 4)
    with pytest.raises(SnugError, match=r"a prompt of 30 tokens \+ max_new_tokens=4 is longer than block_size=32"):
        sample_groups(model, [[1] * 30], 2, 4)


@pytest.mark.parametrize(
    "shape, dtype, sharpness, most, most_kl",
    [
        ("gpt2", "float32", 3, 1e-5, 1e-11),
        ("gpt2", "bfloat16", 10, 0.5, 1e-4),
        ("llama", "bfloat16", 10, 0.5, 1e-4),
        ("linear", "float32", 1, 1e-5, 1e-11),
        ("linear", "bfloat16", 1, 0.5, 1e-4),
    ],  # fmt: skip
)
def test_the_sampler_is_the_trainers_model(shape, dtype, sharpness, most, most_kl):
    """Log-probs of what was sampled, from training's forward, of a model whose attention scores are large."""
    if DEVICE == "cuda":  # adds in other orders, and rounds attention's weights to bfloat16 before they meet the values
        most, most_kl = 3 * most, 4 * most_kl
    model = make_model(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "qkv" in name:
                weight *= sharpness
    with autocast(dtype, model), torch.no_grad():
        rollouts = sample_groups(model, PROMPTS, 100, 20, seed=2)
        logp = torch.log_softmax(model.logits(model(rollouts.tokens)).float(), -1)
    before = rollouts.prompt_lengths[:, None] - 1 + torch.arange(20, device=DEVICE)
    row = torch.arange(len(before), device=DEVICE)[:, None]
    difference = (logp[row, before, rollouts.tokens[row, before + 1]] - rollouts.sampling_logprobs).double()
    assert difference.abs().max() <= most
    assert (difference.exp() - 1 - difference).mean() <= most_kl  # k3


def test_control_characters_are_shown_as_text(monkeypatch, capsys):
    """A model of random weights writes them too."""
    run = loading.Run(make_model(vocab_size=257), get_tokenizer("bytes"), SFTSettings(device=DEVICE), 0, Path("run"))
    monkeypatch.setattr(sample, "load_run", lambda *_: run)
    sample.main(SampleSettings(prompt="\x1b]0;a\x9b\n\té", num_samples=20), set(), None)
    shown = capsys.readouterr().out
    assert shown.count("\\x1b]0;a\\x9b\n\té") == 20
    assert {char for char in shown if unicodedata.category(char) == "Cc"} == {"\n", "\t"}


def test_the_runs_options_hold_unless_others_are_given():
    """Also where what is given is the default: --tools= and --stop_string= take them away."""
    settings = GRPOSettings(device=DEVICE, tools=["examples.tools:calc"], stop_string="e", max_new_tokens=40)
    run = loading.Run(make_model(vocab_size=257), get_tokenizer("bytes"), settings, 0, Path("run"))

    def completed(**options):
        options |= dict(prompt="1+1=", num_samples=50)
        return sample.complete(SampleSettings(**options), set(options), run)

    prompt, texts = completed()
    assert prompt == "1+1="
    whole = "".join(text.removesuffix(" …") for text in texts)
    assert "e" in whole and all("e" not in text[:-1] for text in texts if not text.endswith("…"))
    prompt, texts = completed(tools=[])
    assert prompt == "1+1=" and all("e" not in text[:-1] for text in texts)
    assert any(len(text) < 30 for text in texts) and not all(text.endswith("…") for text in texts)
    assert "e" in "".join(completed(tools=[], stop_string="")[1])
    assert all(len(text) <= 5 for text in completed(tools=[], max_new_tokens=3)[1])
