"""A real language model on a laptop: SmolLM2-135M-Instruct learns to answer sums. `make real` does it all.

All weights train, in float32. data/sums.jsonl has each unordered pair of numbers from 2 to 49 in one sum, so that no
sum of the test split is a training sum turned round.
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
max_tokens_per_micro_batch = 384

learning_rate = 1e-5
# First and last: a checkpoint in between is copied before it is written, 1.5 GiB more
eval_interval = 24
eval_prompts = 120  # all that are held out
