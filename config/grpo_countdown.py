"""GRPO on countdown with three numbers from 1 to 9, + and -. The warm start often just adds the numbers up."""

out_dir = "out/grpo_countdown"
init_from = "config/sft_countdown.py"
task = "examples.countdown:Countdown"
countdown_numbers = "3"
countdown_max_number = 9
countdown_operators = "+-"

max_iters = 120
max_new_tokens = 12
max_tokens_per_micro_batch = 3584

learning_rate = 3e-4
lr_schedule = "linear"
weight_decay = 3.0  # few problems, soon known by heart
save_interval = 40
