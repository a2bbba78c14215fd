"""A warm start by a teacher who forgets 97 of 100 carries: right about one time in twenty."""

out_dir = "out/sft_hard"
task = "addition"
digits = 4
demonstration_noise = 0.97

n_layer = 2
n_head = 4
n_embd = 64
block_size = 40

max_iters = 1000
batch_size = 128
learning_rate = 4e-3
lr_schedule = "cosine"
warmup_iters = 20
eval_interval = 500
save_interval = 500
