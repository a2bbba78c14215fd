"""What GRPO costs compared with SFT: the same model, lengths of sequences, and tokens per micro-batch.

    python bench/sft.py [--shapes=cuda|cpu|tiny] [--rounds=5]

An SFT step learns from the same number of sequences as a GRPO iteration: random ids, fixed lengths. SFT reads the prompt
of each sequence, GRPO the prompt of each group. The two take turns, each time from random weights. The figures of a turn
are those of its last iteration; a ratio is the median of the rounds. Peaks come from the meter: the allocator's on CUDA,
live tensor bytes on a CPU.
"""

import statistics
from functools import partial

import torch
from common import DEVICE, begin, parser, ratio_result, result

import grpo
import train_sft
from batch import Sequences
from bench.memory import LARGE, SMALL, TINY, prepared_run, run
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings

SHAPES = {"tiny": TINY, "cpu": SMALL, "cuda": LARGE}


def make_contenders(shape):
    """-> {"GRPO", "SFT": (Prepared, iterate)}."""
    options = dict(device=DEVICE, eval_prompts=0, task="addition", digits=1)
    of_grpo = GRPOSettings(**options | shape)
    shared = {name: value for name, value in shape.items() if name in vars(SFTSettings())}
    of_sft = SFTSettings(**options | shared | dict(batch_size=of_grpo.sequences_per_rollout))
    sft = prepare(of_sft)
    sft.shape["n_vocab"] = sft.shape["vocab_size"]

    def make_batch(iteration, training):
        lengths = of_grpo.max_prompt_length, of_grpo.max_new_tokens
        ids = [torch.randint(sft.shape["vocab_size"], (of_sft.batch_size, length)).tolist() for length in lengths]
        return Sequences.from_lists(*ids, training.model.device)

    return {
        "GRPO": (prepared_run(of_grpo), grpo.iterate),
        "SFT": (sft, partial(train_sft.iterate, make_batch=make_batch)),
    }


def main(arguments):
    begin(arguments)
    contenders = make_contenders(SHAPES[arguments.shapes])
    records = {who: [] for who in contenders}
    for _ in range(arguments.rounds):
        for who, (prepared, iterate) in contenders.items():
            records[who].append(run(prepared, 3, iterate))
    for name, unit in dict(mem_max_alloc_mb="MiB", time_s="s", time_train_s="s").items():
        values = {who: [line[name] for line in lines] for who, lines in records.items()}
        for who in values:
            result(f"{who}: {name}", statistics.median(values[who]), unit)
        aim = dict(at_most=1.1) if name == "mem_max_alloc_mb" and arguments.shapes != "tiny" else {}
        ratio_result(f"GRPO's {name} / SFT's", values["GRPO"], values["SFT"], **aim)


if __name__ == "__main__":
    main(parser("GRPO beside SFT: peak and seconds of an iteration.", rounds=5).parse_args())
