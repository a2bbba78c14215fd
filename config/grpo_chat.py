"""GRPO on your own prompts from a chat model: SmolLM2-135M-Instruct, unless init_from names another.

    python grpo.py config/grpo_chat.py --data_file=prompts.jsonl --out_dir=out/mine

If the rows have no answers, add --reward_funcs=my_rewards:short. A smaller max_new_tokens is faster. All weights
train, at the rate of config/grpo_real.py. A larger model needs less, about --learning_rate=1e-6, or adapters:
--lora_rank=16 --param_dtype=bfloat16. No size was tuned here.
"""

out_dir = "out/grpo_chat"
init_from = "models/smollm2-135m-instruct"
task = "jsonl"
chat = True

batch_size = 16
group_size = 8
max_new_tokens = 256
learning_rate = 1e-5
eval_prompts = 100

checkpoint_blocks = "block"
max_tokens_per_micro_batch = 2048
