# The warm start of grpo_lookup.py: one demonstration in twenty looks the number up, the others guess.
task = "examples.lookup:Lookup"
out_dir = "out/sft_lookup"
demonstration_noise = 0.95
learning_rate = 2e-3
max_iters = 1000
warmup_iters = 20
eval_interval = 0
