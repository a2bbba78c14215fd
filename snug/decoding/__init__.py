"""Decoding: many completions at a time, a token per step.

    decode_batch   which sequence is in which slot: prefill, start, step, retire, refill
    turns          where the turns of an episode end, and the replies
    recorder       records a step as a CUDA graph and replays it
    kvcache        keys and values of prompts and completions
    attention      the Triton kernels of one step
    draw           one token from each row of logits

Left out: what a rollout is (sample.py).
"""

from snug.decoding.decode_batch import DecodeBatch, as_tuple, check_prompts
from snug.decoding.draw import uniforms
from snug.lora import cached_casts
