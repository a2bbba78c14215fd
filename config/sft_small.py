"""A warm start on a laptop's CPU, about two minutes: a small model imitates a teacher who forgets carries.

The teacher drops each carry with probability 0.6, so a perfect imitator is right about one time in six.
"""

out_dir = "out/sft_small"
demonstration_noise = 0.6

block_size = 40

max_iters = 1000
learning_rate = 4e-3
lr_schedule = "cosine"
warmup_iters = 20
eval_interval = 500
save_interval = 500
