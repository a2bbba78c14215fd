"""GRPO on the shape of Qwen2.5-1.5B, all parameters, on an 8 GB device: planned peak 6.1 GiB, and 17.3 on the host.

    python grpo.py config/grpo_8gb.py --plan --device=cuda

As grpo_qwen2_1.5b.py, with float32 masters and moments on the host. With --optimizer_dtype=bfloat16 they take 5.8 GiB.
"""

out_dir = "out/grpo_8gb"
task = "countdown"

vocab_size = 151936
n_layer = 28
n_head = 12
n_kv_head = 2
n_embd = 1536
n_hidden = 8960
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

dtype = "bfloat16"
param_dtype = "bfloat16"
checkpoint_blocks = "block"
max_tokens_per_micro_batch = 1280
optimizer_device = "host"
