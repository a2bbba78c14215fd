"""GRPO on the shape of Qwen2.5-1.5B on a 48 GB device: it spends memory where that saves time.

    python grpo.py config/grpo_balanced.py --plan --device=cuda

Float32 masters and moments stay on the device. A micro-batch has eight sequences. Attention's outputs are kept, the
rest of a block is recomputed. An iteration has 128 completions (16 prompts x 8).
"""

out_dir = "out/grpo_balanced"
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

batch_size = 16
group_size = 8
max_prompt_length = 256
max_new_tokens = 1024
learning_rate = 1e-6
eval_prompts = 16

dtype = "bfloat16"
param_dtype = "bfloat16"
checkpoint_blocks = "selective"
max_tokens_per_micro_batch = 10240
