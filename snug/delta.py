"""The gated delta net (Yang et al. 2024, arXiv 2412.06464): a layer with a state instead of keys, for Qwen3.5.

Each value head has a state S (K, V), which forgets, and then learns the value v of the key k. It starts at 0:

    S' = exp(g) S     S = S' + k (beta (v - S'^T k))^T     y = S^T q / sqrt(K)     k, q of length 1, g < 0 < beta < 1

    step          one token (snug/kernels/delta_step.py), in the sampler
    delta_rule    64 tokens at once, by matrix products and a triangular system

A causal convolution over the last four tokens comes before the rule, and a gated norm behind it. So a token needs two
things of those before it: the state, and the last three inputs of the convolution. In a packed row a prompt's
completions begin with what their prompt ends with; their gradients are added in a fixed order.

All of this is in float32, whatever the type of the products is; a state in bfloat16 would be 5e-3 off. Backward
computes it again from the projection's output, one layer at a time.

Left out: Triton kernels for training. Test: pytest tests/test_delta.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from snug.device.kinds import wide
from snug.kernels.delta_step import step
from snug.kernels.layers import Linear, RMSNorm
from snug.kernels.segments import Segments
from snug.shape import CONVOLUTION

CHUNK = 64  # tokens


def delta_rule(inputs, S, T):
    """inputs: q, k (N, H, T, K), v (N, H, T, V), g, beta (N, H, T, 1); S (N, H, K, V) -> y like v, the last state.

    A token with beta 0 writes nothing, one with g 0 forgets nothing: padding is 0. Each of `inputs` is copied before
    the next is asked for."""
    chunk = min(CHUNK, T)
    padding = 0, 0, 0, -T % chunk
    q, k, v, g, beta = (F.pad(x, padding).flatten(0, 1).unflatten(1, (-1, chunk)) for x in inputs)
    g = g.cumsum(2)  # within a chunk
    decay = (g - g.mT).tril().exp()  # from each token of a chunk to each later one
    scores = (q @ k.mT * decay).tril()
    # What a token writes depends on what is written before it in its chunk. Above the diagonal nothing is read.
    known = beta * torch.cat([v, k * g.exp()], -1)
    solved = torch.linalg.solve_triangular(
        beta * (k @ k.mT) * decay, known, upper=False, unitriangular=True
    )
    new, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    last = g[..., -1:, :]
    chunks = q * g.exp(), (k * (last - g).exp()).mT, new, read, scores, last.exp()
    heads = S.shape[:2]
    S = S.flatten(0, 1)
    y = []
    for q, k, new, read, scores, kept in zip(*(x.unbind(1) for x in chunks), strict=True):
        values = torch.baddbmm(new, read, S, alpha=-1)
        y.append(torch.baddbmm(q.bmm(S), scores, values))
        S = torch.baddbmm(S * kept, k, values)
    y = torch.cat(y, 1)[:, :T]
    return y.unflatten(0, heads), S.unflatten(0, heads)


def unit(x):
    """x (..., K) -> of length 1, as transformers computes it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class DeltaNet(nn.Module):
    """A linear layer, in the place of attention. H value heads, channels of the convolution: all of q, k and v."""

    def __init__(self, config, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        H = c.linear_value_heads
        values = H * c.linear_value_size
        channels = c.linear_channels
        self.sizes = [channels, values, H, H]  # q, k and v; the output's gate; beta; g
        self.qkv = Linear(c.n_embd, sum(self.sizes), bias=False)
        self.proj = Linear(values, c.n_embd, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, CONVOLUTION, groups=channels, bias=False)
        self.norm = RMSNorm(c.linear_value_size, c.norm_eps)
        self.A_log = nn.Parameter(torch.empty(H).uniform_(0.01, 16).log_())
        self.dt_bias = nn.Parameter(torch.ones(H))

    def forward(self, x, residual=None, rotary=None, cache=None, mask=None):
        """x, residual (B, T, C) -> the layer's output, + residual if there is one. mask: Segments (B = 1), or None.

        Rows of a cache (snug/decoding/kvcache.py) go on from its states; others begin here."""
        x = self.qkv(x)
        with torch.autocast(x.device.type, enabled=False):
            if cache is None:
                y = checkpoint(self.mix, x, mask, use_reentrant=False, preserve_rng_state=False)
            else:
                y = self.go_on(x, cache.states)
        return self.proj(y.to(x.dtype), residual)

    def mix(self, x, segments):
        """x (B, T, sum(sizes)) -> (B, T, H V) of rows that begin here."""
        c = self.config
        B, T, _ = x.shape
        segments = segments or Segments([(T, [])] * B, x.device)
        x = x.view(1, B * T, -1)
        mixed, z, *gates = x.split(self.sizes, -1)
        # The row behind the last is 0. `embedding` adds up gradients in a fixed order.
        earlier = torch.embedding(F.pad(mixed[0], (0, 0, 0, 1)), segments.earlier)
        inputs = self.prepare(earlier[:, None], *gates)
        y = torch.empty_like(inputs[2])
        state = c.linear_value_heads, c.linear_key_size, c.linear_value_size
        states = y.new_zeros(1, *state).flatten(1)
        for turn in filter(None, segments.turns):
            ended = []
            for batch, rows in turn:
                S = torch.embedding(states, rows).unflatten(1, state)
                part, S = delta_rule(map(batch.take, inputs), S, batch.shape[1])
                batch.put(part, y)
                ended.append(S.flatten(1))
            states = torch.cat(ended)
        return self.gated(y, z).view(B, T, -1)

    def go_on(self, x, states):
        """The same of rows that go on from their states."""
        inputs, S = states.read(self.layer)
        mixed, z, *gates = x.split(self.sizes, -1)
        T = x.shape[1]
        inputs = torch.cat([inputs, mixed], 1)
        earlier = inputs.unfold(1, T, 1).permute(1, 0, 3, 2)
        q, k, v, *gates = self.prepare(earlier, *gates)
        gates = (gate * states.real[:, None, :, None] for gate in gates)
        if states.is_step:
            y = step(q, k, v, *gates, S)  # in place
            S = None
        else:
            y, S = delta_rule((q, k, v, *gates), S, T)
        states.write(self.layer, inputs, S)
        return self.gated(y, z)

    def prepare(self, earlier, b, a):
        """earlier (4, N, T, channels), the convolution's inputs three tokens ago ... now; b, a (N, T, H)
        -> what `delta_rule` takes of T tokens, but the state."""
        c = self.config
        K = c.linear_key_size
        dtype = wide(self.A_log.dtype)
        taps = self.conv1d.weight.to(dtype).flatten(1).unbind(1)
        x = F.silu(sum(tap * inputs for tap, inputs in zip(taps, earlier, strict=True)))
        keys = c.linear_key_heads * K
        H = c.linear_value_heads
        q, k, v = x.split([keys, keys, H * c.linear_value_size], -1)
        heads = (unit(x.unflatten(-1, (-1, K))) for x in (q, k))
        q, k = (x.repeat_interleave(H * K // keys, 2) for x in heads)
        g = -self.A_log.to(dtype).exp() * F.softplus(a.to(dtype) + self.dt_bias)
        v = v.unflatten(-1, (H, -1))
        gates = g[..., None], b.to(dtype).sigmoid()[..., None]
        return [part.transpose(1, 2) for part in (q * K**-0.5, k, v, *gates)]

    def gated(self, y, z):
        """y (N, H, T, V), z (N, T, H V) -> (N, T, H V)"""
        y = self.norm(y.transpose(1, 2)).flatten(2)
        return y * F.silu(z.to(y.dtype))
