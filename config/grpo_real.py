"""A real language model on a laptop: SmolLM2-135M-Instruct learns to answer sums. `make real` does it all.

All weights train, in float32.
"""

out_dir = "out/grpo_real"
init_from = "models/smollm2-135m-instruct"
task = "jsonl"
data_file = "data/sums.jsonl"
chat = True
system_prompt = "Answer with a number."

max_iters = 24
batch_size = 16
group_size = 8
max_new_tokens = 16
max_tokens_per_micro_batch = 768

learning_rate = 1e-5
eval_interval = 12
eval_prompts = 64
save_interval = 0
