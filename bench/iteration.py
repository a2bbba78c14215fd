"""A GRPO iteration, phase by phase, beside TRL's GRPOTrainer: the same model folder, prompts, rewards and lengths.

    python bench/iteration.py [--shapes=cuda|cpu|tiny] [--only=WORD] [--rounds=5] [--snug="--NAME=VALUE ..."]
                                                        # TRL's side: pip install trl==1.16.0

ragged    8 prompts of 192 tokens x 8 completions of geometric lengths, mean 24, at most 96; 4 layers x 256; a reference
uniform   8 prompts of 8 tokens x 16 completions of 48 tokens, the same model
short     8 prompts of 64 tokens x 8 completions of 48 tokens; 2 layers x 128; a reference
smollm2   config/grpo_real.py with another reward: a real model, made by `make models/smollm2-135m-instruct`

On CUDA: GPT-2 124M and Qwen2.5-1.5B with random weights. Random weights are a folder that both read. Its stop
token has the same probability at each token. Its text is numbers: "7 12" is the ids 7 and 12.

Contenders are processes that take turns. A process's figure is the median of its iterations without the first two; a
ratio is the median of the pairs. For TRL, train includes the rewards; optimizer is all that happens outside
training_step. TRL's micro-batches have 8, 16, 32 or 64 sequences, whichever was fastest. Peaks are over all iterations
and include weights, moments and the reference: on CUDA the allocator's; on a CPU live tensor bytes by snug/memory/meter.py.
The meter slows TRL down, so another process measures TRL's peak. There TRL's buffer for logits, always 32,768 columns
wide, is not wider than the vocabulary: the rest is never written.

Without TRL only snug is measured. Left out: TRL with Liger, whose loss logprobs.py measures, and unsloth, which replaces
TRL's classes when it is imported and needs a GPU for that.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import tokenizers
import torch
from common import (
    DEVICE,
    GPT2,
    HOME,
    QWEN,
    QWEN_15B,
    begin,
    chosen,
    clocked,
    largest_difference,
    median_result,
    parser,
    synchronize,
)

import grpo
from model import GPT, make_model
from runs.log import read_log
from runs.prepare import prepare
from settings import GRPOSettings
from snug.device.kinds import MIB
from snug.memory import MemoryMeter
from snug.options import read_settings
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import END_OF_TEXT, get_tokenizer

ITERATIONS, UNCOUNTED = int(os.environ.get("BENCH_ITERATIONS", 5)), 2  # of a process
PHASES = ("time_s", "time_rollout_s", "time_reference_s", "time_train_s", "time_optimizer_s")
SMALL = dict(vocab_size=256, n_layer=4, n_head=4, n_embd=256, block_size=512, bias=True)
TINY = dict(vocab_size=64, n_layer=2, n_head=2, n_embd=16, block_size=64)
REAL = (
    HOME / "models/smollm2-135m-instruct",
    [str(HOME / "config/grpo_real.py"), "--data_file=data/sums.jsonl", "--dtype=float32"],
)
FLOAT32 = ["--beta=0.04", "--learning_rate=1e-6", "--dtype=float32"]
BFLOAT16 = [*FLOAT32, "--dtype=bfloat16", "--param_dtype=bfloat16", "--optimizer_dtype=bfloat16"]
# name: (shape, prompts, tokens a prompt, completions a prompt, mean length or 0: never stops, longest, snug's words),
# or (folder, snug's words)
CASES = {
    "cpu": {
        "ragged": (SMALL, 8, 192, 8, 24, 96, FLOAT32),
        "uniform": (SMALL, 8, 8, 16, 0, 48, FLOAT32),
        "short": (SMALL | dict(n_layer=2, n_embd=128), 8, 64, 8, 0, 48, FLOAT32),
        "smollm2": REAL,
    },
    "cuda": {
        "GPT-2 124M": (GPT2 | dict(bias=True), 8, 256, 8, 200, 512, BFLOAT16),
        "Qwen2.5-1.5B": (QWEN_15B | dict(block_size=1024), 8, 256, 8, 200, 512, BFLOAT16),
    },
    "tiny": {
        "ragged": (TINY | dict(bias=True), 2, 12, 4, 6, 20, FLOAT32),
        "uniform": (TINY | QWEN, 2, 4, 2, 0, 8, FLOAT32),
    },
}
SEQUENCES = dict(smollm2=16)  # of TRL's fastest micro-batches; others: 8
AIMS = {("ragged", "time_s"): dict(at_least=8), ("uniform", "time_s"): dict(at_least=1.6)}
AIMS |= {("ragged", "peak_mib"): dict(at_most=0.4)}


# ----------------------------------------------------------------------------------------------------------------------
# The model and the prompts


def make_folder(case, folder):
    """Write the case's model and prompts -> snug's words."""
    if len(case) == 2:
        return [*case[1], f"--init_from={case[0]}"]
    shape, P, T, k, mean, longest, words = case
    torch.manual_seed(0)
    model = make_model(shape, DEVICE)
    set_stop_probability(model, shape["vocab_size"] - 1, 1 / mean if mean else 1e-9)
    if words is BFLOAT16:
        model.bfloat16()
    save_pretrained(model, folder / "model", make_tokenizer(folder / "tokenizer", shape["vocab_size"]))
    rows = [" ".join(str(random.randrange(shape["vocab_size"] - 1)) for _ in range(T)) for _ in range(100)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(dict(prompt=row)) + "\n" for row in rows))
    sizes = [f"--batch_size={P}", f"--group_size={k}", f"--max_new_tokens={longest}"]
    return [f"--init_from={folder}/model", "--task=jsonl", f"--data_file={folder}/prompts.jsonl", *sizes, *words]


def make_tokenizer(folder, vocab_size):
    """Ids are words; the last one ends a completion."""
    words = {str(i): i for i in range(vocab_size - 1)} | {END_OF_TEXT: vocab_size - 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END_OF_TEXT])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=END_OF_TEXT, model_max_length=10**6)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return get_tokenizer(str(folder))


@torch.no_grad()
def set_stop_probability(model, stop, p):
    """A bias of the first block's values makes coordinate 0 the largest by far, about constant. Only `stop` looks at it.

    `stop` is never read by the model, so that its row of the embedding is free, although it is the head's too.
    """
    attention, weight = model.blocks[0].attention, model.embedding.weight
    attention.qkv.weight[-1], attention.qkv.bias[-1] = 0, 1
    attention.proj.weight[0], attention.proj.weight[:, -1] = 0, 0
    attention.proj.weight[0, -1] = 10
    weight[:, 0], weight[stop] = 0, 0
    hidden = model(torch.randint(stop, (8, min(64, model.config.block_size)), device=DEVICE))
    others = model.logits(hidden)[..., :stop].logsumexp(-1).mean()
    weight[stop, 0] = (others + math.log(p / (1 - p))) / hidden[..., 0].mean()


def reward(completion_ids, **_):
    """Of the ids: it differs in every group, so every step is taken."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


# ----------------------------------------------------------------------------------------------------------------------
# The contenders, each in a process of its own


def prepared_run(words, seed, out_dir):
    words = [*words, f"--out_dir={out_dir}", f"--max_iters={ITERATIONS}", f"--seed={seed}", f"--device={DEVICE}"]
    words += ["--eval_prompts=0", "--save_interval=0", "--reward_funcs=bench.iteration:reward"]
    return prepare(*read_settings(GRPOSettings, words)[:2])


def iterations_of_snug(words, seed, folder):
    """-> the log's lines, with the peak in each."""
    grpo.main(prepared_run(words, seed, f"{folder}/run"))
    return [line | dict(peak_mib=line["mem_max_alloc_mb"]) for line in read_log(f"{folder}/run")]


def iterations_of_trl(words, seed, folder, sequences, metered):
    """-> the same of TRL. metered: the peak, and seconds that mean nothing on a CPU."""
    from trl.trainer import utils

    prepared = prepared_run(words, seed, f"{folder}/run")
    s = prepared.settings
    if metered:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(utils._CHUNKED_LOGPROB_CHUNK_SIZE, prepared.shape["vocab_size"])
    with MemoryMeter(DEVICE) if metered else contextlib.nullcontext() as meter:
        model = transformers_model(s.init_from, s.param_dtype)
        if not metered:
            check_same_model(model, s)
        trainer = make_trainer(prepared, model, sequences, 2 if metered else ITERATIONS)
        if (trainer.ref_model is not None) != bool(s.beta):
            raise SystemExit("TRL's reference is not as beta says")
        if metered and DEVICE == "cpu":  # the files' tensors are mapped into memory, by no op
            for weights in (model, trainer.ref_model) if s.beta else (model,):
                for parameter in weights.parameters():
                    meter.live.follow(parameter)
        lines = watched(trainer)
        trainer.train()
        peak = meter.figures()["peak"] / MIB if metered else math.nan
    return [line | dict(peak_mib=peak) for line in lines]


def transformers_model(folder, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(DEVICE)


def make_trainer(prepared, model, sequences, steps):
    """TRL's trainer with our settings and prompts. sequences: of a micro-batch."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    s, tokenizer = prepared.settings, AutoTokenizer.from_pretrained(prepared.settings.init_from)
    rows = prepared.task.prompts("train", range(ITERATIONS * s.batch_size))
    dataset = Dataset.from_list([dict(prompt=row["prompt"]) for row in rows])
    sequences = min(sequences, s.sequences_per_rollout)
    same = ("max_new_tokens", "learning_rate", "adam_beta2", "beta", "loss_type", "temperature", "seed")
    options = {name: getattr(s, name) for name in same} | dict(num_generations=s.group_size)
    options["max_completion_length"] = options.pop("max_new_tokens")
    options |= dict(per_device_train_batch_size=sequences, lr_scheduler_type="constant")
    options |= dict(gradient_accumulation_steps=s.sequences_per_rollout // sequences)
    options |= dict(use_cpu=DEVICE == "cpu", bf16=s.dtype == "bfloat16", gradient_checkpointing=False)
    options |= dict(shuffle_dataset=False, save_strategy="no", output_dir=s.out_dir, max_steps=steps)
    config = GRPOConfig(**options, report_to="none", logging_steps=1, disable_tqdm=True)
    return GRPOTrainer(model, reward, config, dataset, processing_class=tokenizer)


def check_same_model(peer, s):
    """Do both compute the same log-probs from the folder? Otherwise nothing would be compared."""
    model = GPT.from_pretrained(s.init_from, DEVICE, s.param_dtype)
    if not largest_difference(model, peer) < (1e-3 if s.param_dtype == "float32" else 0.2):
        raise SystemExit("snug and transformers read different models from the folder")


def watched(trainer):
    """-> a list that gets a line like snug's for each of the trainer's steps."""
    clock, lines, began = defaultdict(float), [], [time.perf_counter()]

    def timed(name, function):
        def call(*args, **kwargs):
            if name == "reference" and torch.is_grad_enabled():  # the training's log-probs
                return function(*args, **kwargs)
            returned, seconds = clocked(lambda: function(*args, **kwargs))
            clock[name] += seconds
            return returned

        return call

    def log(logs, *args, **kwargs):
        synchronize()
        seconds = time.perf_counter() - began[0]
        original(logs, *args, **kwargs)  # adds TRL's metrics
        if "loss" in logs:  # once a step
            parts = dict(time_rollout_s=clock["rollout"], time_reference_s=clock["reference"])
            parts |= dict(time_train_s=clock["step"] - sum(parts.values()), time_optimizer_s=seconds - clock["step"])
            lines.append(dict(time_s=seconds, completion_length_mean=logs["completions/mean_length"], **parts))
            clock.clear()
            began[0] = time.perf_counter()

    original, trainer.log = trainer.log, log
    trainer._generate = timed("rollout", trainer._generate)
    trainer._get_per_token_logps_and_entropies = timed("reference", trainer._get_per_token_logps_and_entropies)
    trainer.training_step = timed("step", trainer.training_step)  # the first of an iteration holds those two
    return lines


def arm(arguments):
    """-> the medians of the iterations that count."""
    words = json.loads(arguments.words)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if arguments.arm == "snug":
            lines = iterations_of_snug(words + shlex.split(arguments.snug), arguments.seed, folder)
        else:
            metered = "peak" in arguments.arm
            lines = iterations_of_trl(words, arguments.seed, folder, arguments.sequences, metered)
    peak, lines = max(line["peak_mib"] for line in lines), lines[UNCOUNTED:] or lines
    length = statistics.mean(line["completion_length_mean"] for line in lines)
    medians = {name: statistics.median(line.get(name, 0.0) for line in lines) for name in PHASES}
    return medians | dict(peak_mib=peak, length=length)


# ----------------------------------------------------------------------------------------------------------------------
# Rounds


def measured(arm, words, seed, sequences, snug):
    """-> the figures of a contender, from a process of its own. SystemExit if it fails."""
    options = [f"--words={json.dumps(words)}", f"--seed={seed}", f"--sequences={sequences}", f"--snug={snug}"]
    command = [sys.executable, __file__, f"--arm={arm}", *options]
    run = subprocess.run(command, capture_output=True, text=True, cwd=HOME)
    if run.returncode:
        raise SystemExit(f"{arm}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def measure(name, case, arms, arguments):
    """Rounds of a case; tell its figures and ratios."""
    sequences = SEQUENCES.get(name, 8)
    rounds = {who: [] for who in arms}
    with tempfile.TemporaryDirectory() as folder:
        words = make_folder(case, Path(folder))
        for number in range(arguments.rounds):
            for who in arms:
                rounds[who].append(measured(who, words, number + 1, sequences, arguments.snug))
                print(f"{name}, round {number + 1}, {who}: {rounds[who][-1]['time_s']:.3f} s", flush=True)
        for who in arms[1:]:
            peak = measured(f"{who}, peak", words, 1, sequences, "")["peak_mib"]
            rounds[who] = [figures | dict(peak_mib=peak) for figures in rounds[who]]
    tell(name, rounds)


def tell(name, rounds):
    """Print the medians, and the ratios to TRL.

    The ratio of seconds and lengths is theirs / ours, that of peaks ours / theirs. Left out: phases that take no time.
    """
    ours = rounds["snug"]
    for key in (*PHASES, "peak_mib", "length"):
        row = [f"{who} {statistics.median(line[key] for line in lines):10.4g}" for who, lines in rounds.items()]
        print(f"{name}: {key:18}", "   ".join(row), flush=True)
    median_result(f"{name}: snug, an iteration", [line["time_s"] for line in ours], "s")
    for key in (*PHASES, "peak_mib", "length") if "TRL" in rounds else ():
        pair = {who: [line[key] for line in lines] for who, lines in rounds.items()}
        if all(matters(key, line) for line in ours):
            above, below = ("snug", "TRL") if key == "peak_mib" else ("TRL", "snug")
            aim = AIMS.get((name, key), {})
            ratios = [a / b for a, b in zip(pair[above], pair[below], strict=True)]
            median_result(f"{name}: {above}'s {key} / {below}'s", ratios, "x", **aim)


def matters(key, line):
    """A phase of less than a hundredth of the iteration is a few milliseconds, and its ratio is noise."""
    return line[key] >= line["time_s"] / 100 if key in PHASES else line[key]


def main(arguments):
    begin(arguments)
    arms = ["snug", "TRL"]
    if not importlib.util.find_spec("trl"):
        arms.remove("TRL")
        print("TRL is not installed: only snug is measured", flush=True)
    for name, case in CASES[arguments.shapes].items():
        if chosen(name, arguments.only):
            measure(name, case, arms, arguments)


if __name__ == "__main__":
    options = parser("A GRPO iteration, phase by phase, beside TRL's.", rounds=5)
    options.add_argument("--snug", default="", help="more options of snug, such as --max_tokens_per_micro_batch=2048")
    options.add_argument("--arm", help="used by the bench itself, and so are the next three")
    options.add_argument("--sequences", type=int)
    options.add_argument("--words")
    options.add_argument("--seed", type=int)
    arguments = options.parse_args()
    print(json.dumps(arm(arguments))) if arguments.arm else main(arguments)
