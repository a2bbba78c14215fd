"""A real language model learns from tests that are executed: Qwen2.5-Coder-0.5B-Instruct. `make code` does it all.

data/functions.jsonl has 357 small functions of 36 families, and data/functions_test.jsonl 120 of 12 other families;
examples/functions.py wrote both. With MBPP's file instead: --data_file=mbpp.jsonl. A processor without bfloat16 is
faster with --dtype=float32 --param_dtype=float32.
"""

out_dir = "out/grpo_code"
init_from = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
task = "examples.code:Code"
data_file = "data/functions.jsonl"
test_file = "data/functions_test.jsonl"
chat = True

max_iters = 12
batch_size = 6
group_size = 8
max_new_tokens = 192
max_tokens_per_micro_batch = 2048

lora_rank = 16
learning_rate = 1e-4
dtype = "bfloat16"
param_dtype = "bfloat16"
eval_prompts = 0  # evaluate.py does it
save_interval = 6
