"""GRPO from a warm start that has hardly ever seen a carry: the model must discover what to learn."""

out_dir = "out/grpo_hard"
init_from = "bench/configs/sft_hard.py"
task = "addition"
digits = 4

max_iters = 200
batch_size = 64
group_size = 16
max_new_tokens = 24
max_tokens_per_micro_batch = 3584

learning_rate = 3e-4
eval_interval = 25
save_interval = 50
