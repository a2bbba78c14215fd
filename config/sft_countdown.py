"""A warm start for countdown with three numbers from 1 to 9, + and -: half of the demonstrations are solutions, half any expression."""

out_dir = "out/sft_countdown"
task = "countdown"
countdown_min_numbers = 3
countdown_max_numbers = 3
countdown_max_number = 9
countdown_operators = "+-"
demonstration_noise = 0.5  # without it there is little left for GRPO to add: docs/log.md

n_layer = 3
n_head = 4
n_embd = 64
block_size = 24

max_iters = 1000
batch_size = 128
learning_rate = 2e-3
lr_schedule = "cosine"
warmup_iters = 20
eval_interval = 500
save_interval = 500
