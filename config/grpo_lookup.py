# The answer stands only in the reply of a tool, and the warm start calls it in one sample of twenty.
task = "examples.lookup:Lookup"
init_from = "config/sft_lookup.py"
out_dir = "out/grpo_lookup"
tools = ["examples.lookup:get"]
max_new_tokens = 48
batch_size = 32
max_iters = 30
eval_interval = 10
