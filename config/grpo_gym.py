"""GRPO on any generators of reasoning_gym (pip install reasoning_gym), from an instruct model.

    python grpo.py config/grpo_gym.py --init_from=Qwen/Qwen2.5-0.5B-Instruct
    python grpo.py config/grpo_gym.py --init_from=Qwen/Qwen2.5-0.5B-Instruct --gym_dataset=leg_counting,chain_sum

A base model has no chat template: add --chat=false. Sizes and rates are those that others use; none was tuned here.
"""

out_dir = "out/grpo_gym"
task = "reasoning_gym"
gym_dataset = ["chain_sum"]
chat = True

max_iters = 200
batch_size = 16
group_size = 8
max_new_tokens = 400
learning_rate = 1e-6
warmup_iters = 10
eval_prompts = 200
save_interval = 20

dtype = "bfloat16"
checkpoint_blocks = "block"
max_tokens_per_micro_batch = 8192
