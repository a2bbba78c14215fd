"""Checks that run in several processes: this file forks them, and connects them with gloo.

    python tests/processes.py FOLDER none1:plain,sft ddp2:plain,sft      one process does the named checks, then two do

The runs go to FOLDER/none1 and FOLDER/ddp2, and FOLDER/resume. torch is imported once, before the processes part. What
they train is small and in float64, so that what is computed in another order differs by 1e-12 or so. test_parallel.py
starts this and compares.
"""

import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch._dynamo  # what torch imports when it makes a model, and FSDP's: 2 seconds, once and not in each process
import torch.distributed.fsdp

import agents
import grpo
import train_sft
from helpers.models import make_linear_model
from helpers.tasks import letters
from runs.prepare import prepare
from settings import GRPOSettings, SFTSettings
from snug import options as options_of

SHAPE = dict(digits=2, n_layer=2, n_embd=32, block_size=24, device="cpu", eval_prompts=6, eval_interval=2)
GRPO = SHAPE | dict(batch_size=5, group_size=4, max_new_tokens=8, learning_rate=1e-2, max_iters=4, save_interval=0)
SFT = SHAPE | dict(batch_size=8, learning_rate=1e-2, max_iters=4, save_interval=0)
CHECKS = {
    "plain": dict(),
    # Most groups are all equal and are refilled; the trainer's log-probs count; a step of two groups, cut by tokens.
    "dapo": dict(
        max_num_gen_batches=3, importance_sampling_cap=1.5, batch_size=6, train_batch_size=8, epsilon_high=0.28,
        max_tokens_per_micro_batch=60, num_iterations=2, max_iters=2,
    ),
    # One group of two is a step: of four processes two have nothing to do.
    "uneven": dict(train_batch_size=2, group_size=2, batch_size=6, loss_type="grpo", max_iters=2),
    "no variance": dict(max_iters=2),
    "reference": dict(beta=0.1, init_from="none1/sft", checkpoint_blocks="block", max_iters=2),
    "lora": dict(beta=0.1, init_from="none1/sft", lora_rank=4, optimizer_device="host", max_iters=2),
    "teacher": dict(teacher="none1/sft", divergence="sampled", importance_sampling_level="sequence", max_iters=2),
    "divergence": dict(teacher="none1/sft", divergence="reverse_kl", max_tokens_per_micro_batch=60, max_iters=2),
    "linear": dict(init_from="none1/linear_model", max_tokens_per_micro_batch=60, max_iters=2),
    "nf4": dict(beta=0.1, init_from="none1/sft", lora_rank=4, base_dtype="nf4", max_iters=2),
    "offload": dict(param_offload=True, beta=0.1, init_from="none1/sft", max_tokens_per_micro_batch=60, max_iters=2),
    "host": dict(
        optimizer_device="host", grad_offload=True, checkpoint_blocks="block", activation_offload=True, max_iters=2
    ),
    "dropped": dict(max_iters=2),
    "out of memory": dict(max_tokens_per_micro_batch=80, max_iters=2),
}  # fmt: skip


def rarely(prompts, completions, **columns):
    return [float(c[:1] in "abcdefghijklmnopqrstuvwxyz") for c in completions]


def same(prompts, completions, **columns):
    return [1.0] * len(completions)


def train(folder, name, size, options, rewards=(letters,), resume="never"):
    options_of.check_value = lambda cls, name, value, where: value  # float64 is no option
    for place in options.keys() & {"init_from", "teacher"}:
        options = options | {place: f"{folder}/../{options[place]}"}
    if os.environ["PARALLEL"] != "fsdp":
        options = options | dict(param_offload=False)
    options = options | dict(out_dir=f"{folder}/{name}", resume=resume, parallel=os.environ["PARALLEL"])
    settings = GRPOSettings(**GRPO | options)
    settings.param_dtype = settings.optimizer_dtype = "float64"
    prepared = prepare(settings)
    prepared.reward_funcs, prepared.reward_weights = list(rewards), [1.0] * len(rewards)
    return grpo.main(prepared)


def run_check(name, folder, size):
    """The runs leave their folders."""
    rank = int(os.environ["RANK"])
    if name == "sft":
        settings = SFTSettings(**SFT | dict(out_dir=f"{folder}/sft", parallel=os.environ["PARALLEL"]))
        settings.param_dtype = settings.optimizer_dtype = "float64"
        return train_sft.main(prepare(settings))
    if name == "episodes":  # they deal the prompts, join what they sampled, and select the groups to learn from
        kind = dict(max_num_gen_batches=3, parallel=os.environ["PARALLEL"])
        settings = GRPOSettings(**agents.options(folder, "episodes", **kind))
        settings.param_dtype = settings.optimizer_dtype = "float64"
        return grpo.main(prepare(settings))
    if name.startswith("resume"):
        return train(Path(folder).parent, "resume", size, dict(max_iters=int(name[6:])), resume="auto")
    if name == "linear" and size == 1:
        make_linear_model(f"{folder}/linear_model")
    if name == "out of memory" and size > 1 and rank == 1:
        out_of_memory_once()
    if name == "dropped" and rank == size - 1:
        not_a_number_once()
    rewards = {"dapo": [rarely], "no variance": [same], "uneven": [letters, rarely]}.get(name, [letters])
    return train(folder, name, size, CHECKS[name], rewards)


def out_of_memory_once():
    """In this process the first sampling, the first gradient and the first log-probs without gradient fail."""
    for module, function in ((grpo, "sample_episodes"), (grpo, "head_loss")):
        original, failed = getattr(module, function), []

        def fails(*arguments, original=original, failed=failed, **options):
            if not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 EiB.")
            return original(*arguments, **options)

        setattr(module, function, fails)


def not_a_number_once():
    """In this process the first loss is not a number."""
    original = grpo.policy_loss

    def policy_loss(*arguments, **options):
        loss, metrics = original(*arguments, **options)
        grpo.policy_loss = original
        return loss * float("nan"), metrics

    grpo.policy_loss = policy_loss


def fork(size, kind, work, output):
    """Fork `size` processes as torchrun would start them; each calls work(rank). All output goes to the file -> pids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE=str(size))
    os.environ |= dict(PARALLEL=kind, LOCAL_WORLD_SIZE=str(size))
    children = []
    for rank in range(size):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank))
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1), os.dup2(file, 2)
            code = 1
            try:
                work(rank)
                code = 0
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
    return children


def together(folder, size, kind, names):
    """`size` processes do these checks -> 0 if all went well. Output goes to FOLDER/out.txt."""
    folder.mkdir(parents=True, exist_ok=True)

    def work(rank):
        for name in names:
            run_check(name, folder, size)

    children, codes = fork(size, kind, work, folder / "out.txt"), []
    for _ in children:
        _, status = os.wait()
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    return max(map(abs, codes))


if __name__ == "__main__":
    for job in sys.argv[2:]:
        kind, names = job.split(":")
        folder, size = Path(sys.argv[1], kind), int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))
        if together(folder, size, kind.rstrip("0123456789"), names.split(",")):
            sys.exit((folder / "out.txt").read_text()[-4000:])
