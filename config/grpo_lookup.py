# The answer stands only in the reply of a tool, and the warm start calls it in one sample of twenty.
task = "lookup"
init_from = "config/sft_lookup.py"
out_dir = "out/grpo_lookup"
tools = ["data.lookup:get"]
max_new_tokens = 48
group_size = 16
batch_size = 32
learning_rate = 1e-3
max_iters = 30
eval_interval = 10
