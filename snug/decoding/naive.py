"""The oracle of the sampler: one row at a time, without a cache, each token from a whole forward.

Left out: speed. Test: pytest tests/test_sample.py
"""

import torch

from snug.decoding.decode_batch import as_tuple
from snug.decoding.draw import uniforms


@torch.no_grad()
def generate_naive(
    model, prompt, longest, temperature=1, stop_token=None, seed=0, row=0, is_over=None, respond=None
):
    """Row `row` of sample_groups, every token from a whole forward -> (ids; log-probs, None for ids of `respond`)."""
    tokens, logprobs, begin = list(prompt), [], len(prompt)
    uniform = uniforms(seed, [row], range(longest))[0]
    while len(logprobs) < longest:
        hidden = model(torch.tensor([tokens], device=model.device))[0, -1]  # (C,)
        logits = model.logits(hidden).float()  # (V,)
        logp = torch.log_softmax(logits / (temperature or 1), -1)
        if temperature:
            cdf = logp.exp().cumsum(-1)
            drawn = float(uniform[len(logprobs)]) * cdf[-1]
            token = int(torch.searchsorted(cdf, drawn, right=True))
        else:
            token = int(logits.argmax())
        tokens.append(token)
        logprobs.append(float(logp[token]))
        if token in as_tuple(stop_token) or is_over and is_over(tokens[begin:]):
            reply = respond(row, tokens[begin:]) if respond else None
            if reply is None or len(logprobs) + len(reply) >= longest:
                break
            tokens += reply
            logprobs += [None] * len(reply)
            begin = len(tokens)
    return tokens[len(prompt) :], logprobs
