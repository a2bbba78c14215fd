# The answer stands only in the reply of a tool, and the warm start calls it in one sample of twenty.
task = "lookup"
init_from = "config/sft_lookup.py"
out_dir = "out/grpo_lookup"
tools = ["data.lookup:get"]
max_new_tokens = 48
batch_size = 32
max_iters = 30
eval_interval = 10
