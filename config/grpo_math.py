"""A published curve, for one GPU or two CPU cores: Qwen3-0.6B-Base learns MATH from 50 prompts of 8 completions.

    make math

`make math` evaluates MATH-500, trains, and evaluates again; examples/competition_math.py has the downloads. The book
"Build a Reasoning Model (From Scratch)", chapter 6, logged 15.6 % before and 46.2 % after 50 steps, with 20.3 GB
(2,048 tokens in evaluations). Here: the plan is 9.2 GiB; with --lora_rank=16 --learning_rate=1e-4 it is 1.9. The
book samples with top-p 0.9, which snug does not have, because the sampler and the trainer must be the same function.
This recipe was not run here with the real weights.
"""

out_dir = "out/grpo_math"
init_from = "Qwen/Qwen3-0.6B-Base"
task = "examples.competition_math:CompetitionMath"
data_file = "data/math/train.json"
test_file = "data/math/test.json"

max_iters = 50
batch_size = 1
group_size = 8
max_new_tokens = 512
temperature = 0.8
loss_type = "dr_grpo"  # the book sums the tokens of a completion

learning_rate = 1e-5
weight_decay = 0.01
adam_beta2 = 0.999
eval_prompts = 0  # evaluate.py does it

dtype = "bfloat16"
param_dtype = "bfloat16"
checkpoint_blocks = "block"
max_tokens_per_micro_batch = 2048
