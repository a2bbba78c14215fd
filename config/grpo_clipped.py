"""Clipping at work, on a laptop's CPU in about a minute: eight optimizer steps on each rollout. docs/algorithm.md"""

out_dir = "out/grpo_clipped"
init_from = "config/sft_small.py"

max_iters = 20
max_new_tokens = 24

learning_rate = 3e-4
num_iterations = 2
train_batch_size = 256  # of 1,024 completions
