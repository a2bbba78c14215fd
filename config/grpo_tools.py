"""A real language model learns to use a tool: SmolLM2-135M-Instruct and a calculator. `make tools` does it all.

A question is a product such as 904 * 28, which the model cannot compute. One worked example stands before it. The only
reward is the right number at the end.
"""

out_dir = "out/grpo_tools"
init_from = "models/smollm2-135m-instruct"
task = "jsonl"
data_file = "data/products.jsonl"
chat = True
system_prompt = "Use <calc> to compute."
tools = ["examples.tools:calc"]

max_iters = 10
batch_size = 16
group_size = 8
max_new_tokens = 48
max_tokens_per_micro_batch = 640

learning_rate = 1e-5
eval_prompts = 120  # all that are held out
