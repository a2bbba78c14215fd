"""A warm start for countdown with three numbers from 1 to 9, + and -: solutions, unmarred."""

out_dir = "out/sft_countdown"
task = "countdown"
countdown_min_numbers = 3
countdown_max_numbers = 3
countdown_max_number = 9
countdown_operators = "+-"

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
