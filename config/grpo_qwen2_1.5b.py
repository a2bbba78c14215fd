"""GRPO on the shape of Qwen2.5-1.5B, all parameters, on a 16 GB device: planned peak 11.9 GiB. Others measured 21.4.

    python grpo.py config/grpo_qwen2_1.5b.py --plan --device=cuda
    python grpo.py config/grpo_qwen2_1.5b.py --memory_budget_gb=auto    # a larger device: micro-batches that use it

16 completions (4 prompts of up to 256 tokens x 4) of up to 1,024 tokens, one sequence a micro-batch. Weights, gradients
and moments are in bfloat16, rounded stochastically. Random weights and countdown, unless init_from names a run.
"""

out_dir = "out/grpo_qwen2_1.5b"
task = "examples.countdown:Countdown"

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

param_dtype = "bfloat16"
optimizer_dtype = "bfloat16"
checkpoint_blocks = "block"
max_tokens_per_micro_batch = 1280
