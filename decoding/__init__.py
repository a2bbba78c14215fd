"""Decoding: many completions at a time, a token a step.

    decode_batch  which completion is in which slot      kvcache    keys and values of prompts and completions
    attention     the Triton kernels of one step         draw       one token from each row of logits

Left out: what a rollout is (sample.py).
"""
