"""GRPO on the shape of Qwen2.5-7B (with tied embeddings), all parameters, on a 24 GB device: planned peak 15.1 GiB.

    python grpo.py config/grpo_24gb.py --plan --device=cuda

The host must have 93 GiB: 79 for float32 masters and moments, 13 for gradients. With --optimizer_dtype=bfloat16 it is
40 in all.
"""

out_dir = "out/grpo_24gb"
task = "examples.countdown:Countdown"

vocab_size = 152064
n_layer = 28
n_head = 28
n_kv_head = 4
n_embd = 3584
n_hidden = 18944
norm = "rmsnorm"
position = "rotary"
rope_theta = 1e6
mlp = "swiglu"
qkv_bias = True
block_size = 2048

batch_size = 4
group_size = 4
max_prompt_length = 256
max_new_tokens = 1024
learning_rate = 1e-6
eval_prompts = 16

param_dtype = "bfloat16"
checkpoint_blocks = "block"
max_tokens_per_micro_batch = 1280
optimizer_device = "host"
grad_offload = True
