"""Completions out of the model: grouped, cached, batched. Token ids in, token ids out.

A prompt goes through the model once; its k completions share its keys and values; all groups are decoded in one batch. A row
that is over leaves at once, and one that waits takes its slot: a step costs what the rows that go on cost. On CUDA a step is
a replayed graph, and the host looks now and then at who is done. Token t of row i comes from a uniform number that depends on
(seed, i, t) alone (draw.py): a row does not depend on its neighbours. `generate_naive` is the oracle.

    python sample.py out/grpo_small --prompt="6025+3528=" --num_samples=4

Left out: beams, penalties; speculative decoding.
"""

import math
import sys
import time
from dataclasses import dataclass, fields

import numpy as np
import torch
from tqdm import tqdm

from decoding.decode_batch import LOOK_EVERY, Flight, as_tuple, casts_kept, decode_batch
from decoding.draw import Truncation, uniforms
from memory.ledger import kind_of
from memory.meter import tensor_bytes
from model import autocast

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from options import friendly_errors, read_settings
    from runs.checkpoint import find_run
    from settings import SampleSettings

    with friendly_errors():
        settings, _, folder = read_settings(SampleSettings, sys.argv[1:], positional="folder")
        find_run(folder)


@dataclass
class Rollouts:
    """N completions, prompt and completion side by side. k = 2 completions of (a b), stop token `.`, 3 tokens at most:

    tokens  a b x y .   prompt_lengths 2   completion_lengths 3   mask 1 1 1   stopped True
            a b z w u                  2                      3        1 1 1   stopped False (cut off)
            c y . 0 0                  1                      2        1 1 0   stopped True
    """

    tokens: torch.Tensor  # (N, T), right-padded
    prompt_lengths: torch.Tensor  # (N,)
    completion_lengths: torch.Tensor  # (N,), the stop token included
    sampling_logprobs: torch.Tensor  # (N, T_c) float32, 0 after the end
    mask: torch.Tensor  # (N, T_c), 1 on every sampled token, the stop token included
    stopped: torch.Tensor  # (N,) boolean: ended with the stop token, or with a stop string
    stopped_by_text: torch.Tensor | None = (
        None  # (N,) boolean: ended with a stop string, whose last token is the last one
    )
    advantages: torch.Tensor | None = None  # (N,)
    old_logprobs: torch.Tensor | None = None  # (N, T_c)
    ref_logprobs: torch.Tensor | None = None  # (N, T_c)

    @property
    def nbytes(self):
        return tensor_bytes(value for f in fields(self) if (value := getattr(self, f.name)) is not None)

    def completions(self):
        """-> N lists of ids, without the stop token."""
        by_token = self.stopped if self.stopped_by_text is None else self.stopped & ~self.stopped_by_text
        ends = zip(self.prompt_lengths.tolist(), self.completion_lengths.tolist(), by_token.tolist(), strict=True)
        rows = self.tokens.tolist()
        return [row[start : start + length - one] for row, (start, length, one) in zip(rows, ends, strict=True)]

    def select(self, rows):
        """-> the Rollouts of some rows, a tensor or list of their numbers, in that order."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return Rollouts(**{name: None if value is None else value[rows] for name, value in parts.items()})

    @classmethod
    def joined(cls, parts):
        """Several Rollouts, one below the other, padded on the right to the longest."""
        columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(cls)}
        widest = {name: max(v.shape[-1] for v in values) for name, values in columns.items() if values[0] is not None}

        def pad(name, value):
            return torch.nn.functional.pad(value, (0, widest[name] - value.shape[1])) if value.dim() > 1 else value

        return cls(
            **{name: torch.cat([pad(name, v) for v in columns[name]]) if name in widest else None for name in columns}
        )


@torch.no_grad()
def sample_groups(
    model,
    prompts,
    group_size,
    max_new_tokens,
    *,
    temperature=1.0,
    stop_token=None,
    seed=0,
    max_batch=None,
    chunk_mb=0,
    first_row=0,
    truncation=None,
    is_over=None,
    enforce_eager=False,
    progress=False,
):
    """`group_size` completions of each prompt -> Rollouts of N = len(prompts) * group_size, groups adjacent, in order.

    prompts: non-empty lists of ids. A completion ends with stop_token (or with one of several, where it is a tuple), or where is_over(its ids) is first true (tokenizer.stopper
    makes such a function of a string), or at max_new_tokens. temperature: 0 takes the likeliest token. truncation: a
    draw.Truncation.

    max_batch: completions decoded at a time (default all); where one ends, the next begins in its place. first_row: the number of the first row, where these are more of what was begun.
    enforce_eager: no CUDA graphs. progress: a bar in a terminal, if it takes more than some seconds.

    Raises ValueError where a prompt is empty or does not leave max_new_tokens, at least 1, of block_size.
    """
    lengths = [len(p) for p in prompts]
    if not prompts or min(lengths) == 0:
        raise ValueError("a prompt has no tokens; the model needs at least one to go on from")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: a completion has at least one token")
    if max(lengths) + max_new_tokens > model.config.block_size:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens + max_new_tokens={max_new_tokens} is longer than block_size={model.config.block_size}"
        )
    slots = decode_batch(len(prompts), group_size, max_batch)
    # Inference mode saves a tenth of a step's time on a CPU, and `assemble` makes no tensor in it. In it autocast would cast the
    # weights at every step again.
    quiet = torch.no_grad() if torch.is_autocast_enabled(model.device.type) else torch.inference_mode()
    with quiet, casts_kept(model), Bar(len(prompts) * group_size, progress) as bar:
        how, graphs = (temperature, chunk_mb, truncation), model.device.type == "cuda" and not enforce_eager
        flight = Flight(model, prompts, group_size, max_new_tokens, slots, stop_token, how, is_over, graphs)
        numbers = np.arange(first_row, first_row + flight.N)
        flight.u[: flight.N] = torch.from_numpy(uniforms(seed, numbers, np.arange(max_new_tokens)))
        while flight.fill():
            for _ in range(LOOK_EVERY[kind_of(flight.rows)]):
                flight.step()
            bar.show(flight)
        tokens, logprobs, cut = flight.tokens[: flight.N], flight.logprobs[: flight.N], flight.cut
        del flight
    return assemble(prompts, group_size, tokens, logprobs, stop_token, cut if is_over else None)


class Bar:
    """Completions that are over, and tokens a second, in a terminal."""

    def __init__(self, total, wanted):
        look = dict(
            bar_format="sampling: {n_fmt}/{total_fmt} completions |{bar}| {elapsed}{postfix}", delay=1e9, leave=False
        )
        self.bar = tqdm(total=total, disable=None if wanted else True, **look)
        self.tokens, self.began, self.shown = 0, time.monotonic(), 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.shown:
            self.bar.clear()
        self.bar.close()

    def show(self, flight):
        if not self.bar.disable:
            going = len(flight.rows) - flight.free
            self.tokens += going * LOOK_EVERY[kind_of(flight.rows)]
            seconds = time.monotonic() - self.began
            if seconds > max(3.0, self.shown + 0.2):
                self.shown, self.bar.n = seconds, flight.next - going
                self.bar.set_postfix_str(f"{self.tokens / seconds:,.0f} tok/s")


def assemble(prompts, k, tokens, logprobs, stop_token, cut=None):
    """tokens, logprobs (N, T_c) -> Rollouts; T_c and T are cut to the longest there is. cut {row: length}: where text ended a row."""
    N, steps = tokens.shape
    device = tokens.device
    is_stop = torch.isin(tokens, torch.tensor(as_tuple(stop_token), dtype=torch.long, device=device))
    # The first stop token ends a row. What follows it is zero, which may be the stop token's id too.
    stopped = is_stop.any(1)
    lengths = torch.where(stopped, is_stop.int().argmax(1) + 1, steps)  # (N,)
    by_text = None
    if cut is not None:
        rows = torch.tensor(list(cut), dtype=torch.long, device=device)
        lengths[rows] = torch.tensor(list(cut.values()), dtype=torch.long, device=device)
        by_text = torch.zeros_like(stopped).index_fill_(0, rows, True)
        stopped = stopped | by_text
    T_c = int(lengths.max())
    prompt_lengths = torch.tensor([len(p) for p in prompts], device=device).repeat_interleave(k)
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(device)
    whole = torch.zeros(N, int((prompt_lengths + lengths).max()), dtype=torch.long, device=device)
    whole[:, : padded.shape[1]] = padded.repeat_interleave(k, 0)[:, : whole.shape[1]]
    mask = torch.arange(T_c, device=device) < lengths[:, None]  # (N, T_c)
    row, place = mask.nonzero(as_tuple=True)
    whole[row, prompt_lengths[row] + place] = tokens[row, place]
    return Rollouts(whole, prompt_lengths, lengths, logprobs[:, :T_c] * mask, mask.long(), stopped, by_text)


@torch.no_grad()
def generate_naive(
    model, prompt, max_new_tokens, *, temperature=1.0, stop_token=None, seed=0, row=0, truncation=None, is_over=None
):
    """One prompt, no cache, no batch, every token from a whole forward -> (ids, log-probs): row `row` of sample_groups."""
    tokens, logprobs = list(prompt), []
    for u in uniforms(seed, [row], range(max_new_tokens))[0]:
        hidden = model(torch.tensor([tokens], device=model.device))[0, -1]
        logits = model.logits(hidden).float()
        logp = torch.log_softmax(logits / temperature if temperature else logits, -1)
        probs = logp.exp()
        cdf = (probs * truncation(probs[None])[0] if truncation else probs).cumsum(-1)
        token = (
            int(torch.searchsorted(cdf, torch.tensor(float(u)) * cdf[-1], right=True))
            if temperature
            else int(logits.argmax())
        )
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token in as_tuple(stop_token) or is_over and is_over(tokens[len(prompt) :]):
            break
    return tokens[len(prompt) :], logprobs


def main(settings, folder):
    from data import make_task
    from data.task import as_messages
    from options import SnugError
    from runs.checkpoint import load_run

    run = load_run(folder, settings.device)
    if not settings.prompt and not run.settings.task:
        raise SnugError(f"{folder} was not trained here, so it has no task to take a prompt from; give --prompt=...")
    prompt = settings.prompt or make_task(run.settings).prompts("test", [settings.seed])[0]["prompt"]
    if settings.prompt and (settings.chat or run.settings.chat):
        prompt = as_messages(prompt, settings.system_prompt or run.settings.system_prompt)
    elif settings.system_prompt:
        raise SnugError(f"system_prompt={settings.system_prompt!r:.60} is a message of a chat; add --chat")
    ids = run.tokenizer.encode_prompt(prompt)
    shown = prompt if isinstance(prompt, str) else f"{prompt[-1]['content']}\n"
    room = run.model.config.block_size - len(ids)
    if not ids or room < 1:
        raise SnugError(f"the prompt has {len(ids)} tokens; this model takes 1 to {run.model.config.block_size - 1}")
    with autocast(run.settings.dtype, run.model):
        rollouts = sample_groups(
            run.model,
            [ids],
            settings.num_samples,
            min(settings.max_new_tokens, room),
            temperature=settings.temperature,
            stop_token=run.tokenizer.stop_tokens,
            seed=settings.seed,
            truncation=Truncation(settings.top_k, settings.top_p, settings.min_p),
            is_over=run.tokenizer.stopper(settings.stop_string),
            enforce_eager=settings.enforce_eager,
            progress=True,
        )
    ends = zip(
        rollouts.completions(), rollouts.stopped.tolist(), rollouts.sampling_logprobs.sum(1).tolist(), strict=True
    )
    for completion, stopped, logprob in ends:
        text = run.tokenizer.decode(completion)
        text = (
            text[: text.index(settings.stop_string)] if settings.stop_string and settings.stop_string in text else text
        )
        print(f"{shown}{text}{'' if stopped else ' …'}   [probability {math.exp(logprob):.3g}]")


if __name__ == "__main__":
    with friendly_errors():
        main(settings, folder)
