"""Completions from the model: grouped, cached, batched. Token ids in, token ids out.

    python sample.py out/grpo_small --prompt="6025+3528=" --num_samples=4

A prompt goes through the model once, and its k completions share its keys and values. All groups are decoded in one
batch. When a completion ends, a waiting completion takes its slot at once (snug/decoding/). The uniform number that
draws token t of row i depends on (seed, i, t) only, so a row does not depend on its neighbours. In bfloat16 its
logits may depend on the number of rows, because other products round differently. Tests: the slow `generate_naive`.

With `respond` a completion is an episode of several turns: a tool or an environment answers at the end of a turn. The
model reads the answer behind the row's own keys and values, and sampling goes on. No token is computed twice.

Left out: top-k, top-p (training draws from the whole policy), beams. Test: pytest tests/test_sample.py
"""

import sys

if __name__ == "__main__":  # before torch is imported: a typo is answered at once
    from runs.checkpoint import find_run
    from settings import SampleSettings
    from snug.options import friendly_errors, read_settings
    from snug.options.progress import speak

    with friendly_errors():
        speak(sys.stderr)
        settings, given, folder = read_settings(SampleSettings, sys.argv[1:], positional="folder")
        run = find_run(folder)

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from batch import Sequences
from data import make_task
from data.episodes import Episodes, as_text, make_toolbox
from data.task import as_messages, split_beginning
from model import GPT, autocast
from runs.loading import load_run
from runs.notes import unused_template
from runs.prepare import Prepared
from settings import PRETRAINED_LENGTH, GRPOSettings
from snug.decoding import DecodeBatch, as_tuple, cached_casts, check_prompts, uniforms
from snug.decoding.naive import generate_naive as generate_naive
from snug.options import SnugError, merge_options, note, plain

REPLIES = 16  # calls of `respond` at a time


@dataclass
class Rollouts(Sequences):
    """N completions, each behind its prompt. Two completions of (a b), one of (c), stop token `.`, at most 3 tokens:

    tokens  a b x y .   prompt_lengths 2   completion_lengths 3   mask 1 1 1   stopped True
            a b z w u                  2                      3        1 1 1   stopped False (cut off)
            c y . 0 0                  1                      2        1 1 0   stopped True

    An episode has the prompt (a b), the turn (x .), a reply (r s), the turn (y .), at most 6 tokens:

            a b x . r s y .            2                      6        1 1 0 0 1 1   stopped True
    """

    # tokens (N, T), prompt_lengths and completion_lengths (N,), the stop token and what `respond` wrote included
    sampling_logprobs: Tensor  # (N, T_c) float32, 0 where mask is 0
    mask: Tensor  # (N, T_c), 1 where sampled, the stop token too; 0 where `respond` wrote
    stopped: Tensor  # (N,) boolean: ended with the stop token or a stop string, not cut off
    advantages: Tensor | None = None  # (N,)
    old_logprobs: Tensor | None = None  # (N, T_c)
    ref_logprobs: Tensor | None = None  # (N, T_c)
    # The teacher's log-probs (N, T_c), or its hidden states (N, T_c, C_T), perhaps on the host
    teacher_outputs: Tensor | None = None

    def completions(self):
        """-> N lists of ids, with their stop tokens, as in TRL."""
        lengths = self.prompt_lengths.tolist(), self.completion_lengths.tolist()
        rows = zip(self.tokens.tolist(), *lengths, strict=True)
        return [ids[start : start + length] for ids, start, length in rows]

    def select(self, sequences) -> "Rollouts":
        """The completions with these numbers, a tensor or a list, in that order."""
        return Rollouts(**{name: column[sequences] for name, column in self.columns().items()})

    @classmethod
    def joined(cls, rollouts: list["Rollouts"]) -> "Rollouts":
        """Several Rollouts, one below the other, right-padded to the longest."""
        columns = {}
        for name in rollouts[0].columns():
            tensors = [getattr(each, name) for each in rollouts]
            if tensors[0].dim() > 1:
                width = max(tensor.shape[1] for tensor in tensors)
                tensors = [
                    torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors
                ]
            columns[name] = torch.cat(tensors)
        return cls(**columns)


def sample_episodes(model, prepared, rows, k, max_new_tokens, shorten=False, **options):
    """k completions of each task row's prompt -> (Rollouts, their Episodes). shorten: to fit into block_size."""
    settings, tokenizer = prepared.settings, prepared.tokenizer
    with chdir("."), autocast(settings.dtype, model):  # a tool may change the directory
        episodes = Episodes(prepared.toolbox, tokenizer, rows, k, settings.stop_string)
        prompts = [prepared.encode(row["prompt"]) for row in episodes.rows]
        if shorten:
            room = model.config.block_size - max(map(len, prompts))
            max_new_tokens = max(1, min(max_new_tokens, room))
        rollouts = sample_groups(
            model,
            prompts,
            episodes.k,
            max_new_tokens,
            stop_token=tokenizer.stop_tokens,
            is_over=episodes.is_over,
            respond=episodes.respond,
            enforce_eager=settings.enforce_eager,
            chunk_mb=settings.logits_chunk_mb,
            **options,
        )
    return rollouts, episodes


def sample_groups(
    model: GPT,
    prompts: list[list[int]],
    group_size: int,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    stop_token: int | tuple[int, ...] | None = None,
    seed: int = 0,
    max_batch=None,
    chunk_mb=0,
    first_row: int = 0,
    is_over: Callable[[list[int]], bool] | None = None,
    respond: Callable[[int, list[int]], list[int] | None] | None = None,
    enforce_eager: bool = False,
) -> Rollouts:
    """`group_size` completions of each prompt, side by side -> N = len(prompts) * group_size rows.

    A completion ends with stop_token (or one of several), or when is_over(its ids) is true for the first time
    (tokenizer.stopper makes such a function for a string), or at max_new_tokens. temperature 0: the likeliest token.

    respond(row, ids of the turn): with it a stop token ends a turn only. It returns the ids of the reply, perhaps an
    empty list, or None if the completion is over. Threads call it for several rows at a time. The ids that respond and
    is_over get begin behind the last reply. If a reply leaves no room for another token, it is not written, and
    the completion is cut off.

    max_batch: completions decoded at a time (default all), which bounds the KV cache. chunk_mb: MiB that logits take
    (0: the device's default). first_row: the number of the first row. enforce_eager: no CUDA graphs.

    Raises ValueError if a prompt is empty, SnugError if a prompt and max_new_tokens exceed block_size.
    """
    check_prompts(prompts, max_new_tokens, model.config.block_size)
    N = len(prompts) * group_size
    no_gradient = torch.inference_mode()  # saves a tenth of a step on a CPU
    # In it autocast would not keep its casts of the weights.
    if torch.is_autocast_enabled(model.device.type):
        no_gradient = torch.no_grad()
    all_train = all(p.requires_grad for p in model.parameters())
    frozen_casts = nullcontext() if all_train else cached_casts(model)
    with ThreadPoolExecutor(REPLIES) as pool, no_gradient, frozen_casts:
        batch = DecodeBatch(
            model,
            prompts,
            group_size,
            max_new_tokens,
            max_batch,
            stop_token,
            temperature=temperature,
            chunk_mb=chunk_mb,
            is_over=is_over,
            ask=partial(pool.submit, respond) if respond else None,
            cuda_graphs=model.device.type == "cuda" and not enforce_eager,
        )
        rows = np.arange(first_row, first_row + N)
        batch.u[:N] = torch.from_numpy(uniforms(seed, rows, range(max_new_tokens)))
        batch.decode()
        tokens, logprobs = batch.tokens[:N], batch.logprobs[:N]
        written, turns = batch.written, batch.turns
        del batch  # the KV cache ends here
    return assemble(prompts, group_size, stop_token, tokens, logprobs, written, turns)


def assemble(prompts, k, stop_token, tokens, logprobs, written, turns):
    """tokens, logprobs (N, max_new_tokens) -> Rollouts. written, turns: a DecodeBatch's. Without turns a row ends with
    its first stop token."""
    device = tokens.device
    if turns:
        ends = [turns.ends[row] for row in range(len(tokens))]
        lengths, stopped = torch.tensor(ends, device=device).T
    else:
        stops = torch.tensor(as_tuple(stop_token), dtype=torch.long, device=device)
        is_stop = torch.isin(tokens, stops)
        # Behind the end are zeros, and 0 may be a stop token too.
        stopped = is_stop.any(1)
        lengths = torch.where(stopped, is_stop.int().argmax(1) + 1, tokens.shape[1])  # (N,)
    T_c = int(lengths.max())
    mask = torch.arange(T_c, device=device) < lengths[:, None]  # (N, T_c)
    if written is not None:
        mask &= ~written[: len(tokens), :T_c]
    repeated = [prompt for prompt in prompts for _ in range(k)]
    completions = [ids[:n] for ids, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    return Rollouts(
        **vars(Sequences.from_lists(repeated, completions, device)),
        sampling_logprobs=logprobs[:, :T_c] * mask,
        mask=mask.long(),
        stopped=stopped.bool(),
    )


def complete(settings, given, run, functions: Mapping = {}):
    """Complete settings.prompt or a held-out one -> (prompt or last message, completions). A cut-off completion ends
    with " …". given: names of the options that are given; others are the run's. functions: as for runs.prepare."""
    merged = merge_options(
        GRPOSettings,
        run.settings,
        settings,
        given,
        max_iters=0,
        max_prompt_length=0,
        out_dir=str(run.path),
    )
    if settings.prompt:
        chat, prompt = merged.chat or merged.system_prompt, settings.prompt
        row = dict(prompt=as_messages(prompt, merged.system_prompt) if chat else prompt)
    elif merged.task:
        [row] = make_task(merged).prompts("test", [settings.seed])
    else:
        raise SnugError(f"{run.path} has no task to take a prompt from; give --prompt=...")
    run.tokenizer.set_template_kwargs(merged.chat_template_kwargs)
    toolbox = make_toolbox(merged, run.tokenizer, functions)
    prepared = Prepared(merged, None, run.tokenizer, {}, [], [], toolbox=toolbox)
    rollouts, episodes = sample_episodes(
        run.model,
        prepared,
        [row],
        settings.num_samples,
        merged.max_new_tokens or PRETRAINED_LENGTH,
        shorten=True,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    shown = split_beginning(row["prompt"])[0] if episodes.rows[1:] else episodes.prompts[0]
    if not run.settings.task:  # a model from elsewhere
        for line in unused_template(run.tokenizer, [shown]):
            note(f"note: {line}")
    texts = []
    for completion, stopped in zip(episodes.finish(rollouts), rollouts.stopped.tolist(), strict=True):
        completion = as_text(completion) if toolbox else completion
        texts.append(completion if stopped else f"{completion} …")
    return shown if isinstance(shown, str) else f"{shown[-1]['content']}\n", texts


def main(settings, given, run):
    """run: what find_run returned."""
    shown, texts = complete(settings, given, load_run(run, settings.device))
    for text in texts:
        print(plain(shown + text))


if __name__ == "__main__":
    with friendly_errors():
        main(settings, given, run)
