"""On-policy distillation on a laptop in half a minute: the warm start learns from the model of config/grpo_small.py.

`make run` makes that teacher first. Rewards are logged and not learned from, so each prompt has one completion.
"""

out_dir = "out/distill_small"
init_from = "config/sft_small.py"
teacher = "out/grpo_small"
divergence = "reverse_kl"
reward_coef = 0.0

max_iters = 80
batch_size = 256
group_size = 1
max_new_tokens = 24
max_tokens_per_micro_batch = 3584
