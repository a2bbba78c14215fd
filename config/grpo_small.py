"""GRPO on a laptop's CPU in about two minutes: nearly every sum becomes right (pass@1 from 0.05 to 1).

The model starts as an imitator of a teacher who forgets carries.
beta = 0.04 keeps a reference in the loop, so the log shows its cost.
"""

out_dir = "out/grpo_small"
init_from = "config/sft_small.py"

max_iters = 80
max_new_tokens = 24
# As many as an SFT step of 128 sequences of 28 tokens has, so that the two peaks compare
max_tokens_per_micro_batch = 3584

learning_rate = 3e-4
beta = 0.04
save_interval = 20
