"""GRPO on GSM8K from an instruct model: Qwen2.5-0.5B-Instruct, SmolLM2-360M-Instruct, Llama-3.2-1B-Instruct, ...

    curl --create-dirs --output-dir data/gsm8k --remote-name-all \\
        https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{train,test}.jsonl
    python grpo.py config/grpo_gsm8k.py --init_from=Qwen/Qwen2.5-0.5B-Instruct

A larger model with LoRA: add --lora_rank=16 --param_dtype=bfloat16. A base model has no chat
template: add --chat=false. Sizes are those that others use; none of them was tuned here. Twenty
iterations of 32 completions on two CPU cores taught a 0.5B model nothing. In programs in place of
words a teacher did, and rewards too: `make gsm8k` (docs/results.md, Code).
"""

out_dir = "out/grpo_gsm8k"
task = "gsm8k"
data_file = "data/gsm8k/train.jsonl"
test_file = "data/gsm8k/test.jsonl"
chat = True

max_iters = 200
batch_size = 16
group_size = 8
max_new_tokens = 400

eval_prompts = 200
save_interval = 20

dtype = "bfloat16"
param_dtype = "auto"  # on a GPU bfloat16, beside float32 masters
checkpoint_blocks = "block"
max_tokens_per_micro_batch = 8192
