"""Shapes of known models, as options of settings.py. block_size is added where it is missing."""

GPT2 = dict(vocab_size=50257, n_layer=12, n_head=12, n_embd=768, block_size=1024)
QWEN = dict(norm="rmsnorm", position="rotary", mlp="swiglu", qkv_bias=True, rope_theta=1e6)
QWEN_05B = QWEN | dict(vocab_size=151936, n_layer=24, n_head=14, n_kv_head=2, n_embd=896, n_hidden=4864)
QWEN_15B = QWEN | dict(vocab_size=151936, n_layer=28, n_head=12, n_kv_head=2, n_embd=1536, n_hidden=8960)
UNTIED = QWEN | dict(vocab_size=151936, tie_embeddings=False)  # as published, from 7B on
QWEN_7B = UNTIED | dict(n_layer=28, n_head=28, n_kv_head=4, n_embd=3584, n_hidden=18944)
