"""A warm start for countdown with three numbers from 1 to 9, + and -: two in five demonstrations only add them up."""

out_dir = "out/sft_countdown"
task = "examples.countdown:Countdown"
countdown_numbers = "3"
countdown_max_number = 9
countdown_operators = "+-"
demonstration_noise = 0.4

n_layer = 3
n_embd = 128
block_size = 24

max_iters = 2000
learning_rate = 2e-3
lr_schedule = "cosine"
warmup_iters = 20
weight_decay = 1.0  # there are 550 problems; with 0 they are learned by heart: docs/log.md
eval_interval = 500
save_interval = 500
