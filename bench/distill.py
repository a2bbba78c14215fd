"""A teacher on addition: GRPO, distillation, both, and SFT on the teacher's answers, by samples and by seconds.

    python bench/distill.py                        five seeds, one thread: about 40 minutes
    python bench/distill.py --seeds=1 --only="reverse_kl"
    python bench/distill.py --shapes=tiny          only shows that it runs

Student: a warm start of config/sft_small.py for each seed. Teacher: config/grpo_small.py of seed 1. Every run is evaluated on
the same 500 held-out prompts, every 1,024 samples. Seconds are the process's CPU seconds on one thread, evaluations
included, so that other work on the machine matters less.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

from common import HOME, chosen, parser

from runs.log import read_log, values_of

SHIPPED = dict(eval_interval=1)  # config/grpo_small.py: 80 iterations of 64 prompts x 16
SMALL = dict(max_iters=80, learning_rate=1e-3, beta=0.0, eval_interval=4)
GROUPS = SMALL | dict(batch_size=16, group_size=16)
ALONE = SMALL | dict(batch_size=256, group_size=1, reward_coef=0.0)
TINY = dict(max_iters=1, batch_size=2, eval_prompts=2, eval_interval=1)
limits = {}  # options of all runs: TINY, or none
VARIANTS = {
    "GRPO, config/grpo_small.py": SHIPPED,
    "GRPO, 16 x 16, 1e-3": GROUPS,
    "GRPO, 16 x 16, 3e-4": GROUPS | dict(learning_rate=3e-4),
    "teacher, sampled": ALONE | dict(divergence="sampled"),
    "teacher, reverse_kl": ALONE | dict(divergence="reverse_kl"),
    "both, reverse_kl, 16 x 16, 3e-4": GROUPS | dict(divergence="reverse_kl", learning_rate=3e-4),
    "SFT on the teacher's answers": dict(batch_size=256, max_iters=80, learning_rate=1e-3, eval_interval=4),
}


def run(out, name, seed):
    """Train in a process of its own, unless that is done."""
    folder = out / f"{name.replace('/', '-')}_{seed}"
    if (folder / "cpu_seconds").exists():
        return
    options = VARIANTS[name] | dict(seed=seed, init_from=out / f"sft_{seed}", out_dir=folder, save_interval=0)
    script, config = ["grpo.py"], "config/grpo_small.py"
    if name.startswith("SFT"):
        script, config = ["bench/distill.py", "--from_teacher"], "config/sft_small.py"
    elif not name.startswith("GRPO"):
        options["teacher"] = out / "teacher"
    start(folder, [*script, config], options)


def start(folder, words, options):
    environment = os.environ | dict(OMP_NUM_THREADS="1", TEACHER=str(folder.parent / "teacher"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = options | limits
    words = [*words, "--device=cpu", *[f"--{name}={value}" for name, value in options.items()]]
    subprocess.run([sys.executable, *words], cwd=HOME, stdout=subprocess.DEVNULL, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (folder / "cpu_seconds").write_text(f"{seconds:.1f}")


def prepare_models(out, seeds):
    for seed in {1, *seeds}:
        folder = out / f"sft_{seed}"
        if not (folder / "cpu_seconds").exists():
            start(folder, ["train_sft.py", "config/sft_small.py"], dict(seed=seed, out_dir=folder))
    folder = out / "teacher"
    if not (folder / "cpu_seconds").exists():
        start(folder, ["grpo.py", "config/grpo_small.py"], dict(seed=1, init_from=out / "sft_1", out_dir=folder))


def sft_from_teacher(words):
    """train_sft.py, but each demonstration is drawn from the teacher, at temperature 1."""
    import train_sft
    from runs.loading import load_run
    from runs.prepare import prepare
    from sample import sample_groups
    from settings import SFTSettings
    from snug.options import read_settings

    teacher = load_run(os.environ["TEACHER"], "cpu").model

    def demonstrations(iteration, training):
        settings, tokenizer = training.settings, training.prepared.tokenizer
        first = iteration * settings.batch_size
        rows = training.prepared.task.prompts("train", range(first, first + settings.batch_size))
        prompts = [tokenizer.encode_prompt(row["prompt"]) for row in rows]
        seed = settings.seed * 2**32 + iteration
        return sample_groups(teacher, prompts, 1, 24, stop_token=tokenizer.stop_tokens, seed=seed)

    train_sft.demonstrations = demonstrations
    train_sft.main(prepare(*read_settings(SFTSettings, words)[:2]))


def reached(log, name, wanted, samples, seconds):
    """-> (samples, CPU seconds) up to the first evaluation that is as good as `wanted`, or None."""
    last = len(log)
    for iteration, score in values_of(log, name):
        if score >= wanted and iteration >= 0:
            return (iteration + 1) * samples, seconds * (iteration + 1) / last
    return None


def row(out, name, seeds):
    """-> a line of the table: medians over the seeds, and the worst."""
    cells = []
    for score in ("pass_at_1", "pass_at_1_sampled"):
        finals, marks = [], []
        for seed in seeds:
            folder = out / f"{name.replace('/', '-')}_{seed}"
            settings = json.loads((folder / "settings.json").read_text())
            log, seconds = read_log(folder), float((folder / "cpu_seconds").read_text())
            wanted = read_log(out / f"{next(iter(VARIANTS)).replace('/', '-')}_{seed}")[-1][score]
            finals.append(log[-1][score])
            samples = settings["batch_size"] * settings.get("group_size", 1)
            marks.append(reached(log, score, wanted, samples, seconds))
        there = sorted(mark for mark in marks if mark)
        cells.append(f"{median(finals):.3f} ({min(finals):.3f} to {max(finals):.3f})")
        if len(there) > len(marks) / 2:
            middle = median(samples for samples, _ in there), median(seconds for _, seconds in there)
            cells.append(f"{len(there)} of {len(marks)}: {middle[0]:,.0f}, {middle[1]:.0f} s")
        else:
            cells.append(f"{len(there)} of {len(marks)}")
    return f"| {name} | {' | '.join(cells)} |"


def main(arguments):
    out = Path(arguments.out_dir).absolute()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    names = [name for name in VARIANTS if chosen(name, arguments.only)]
    if arguments.shapes == "tiny":
        limits.update(TINY)
    prepare_models(out, seeds)
    for seed in seeds:
        for name in names:
            run(out, name, seed)
            print(row(out, name, [seed]), flush=True)
    print(
        "| | pass@1, greedy | GRPO's last reached by: samples, CPU seconds | sampled | GRPO's last sampled reached by |"
    )
    print("|---|---|---|---|---|")
    for name in names:
        print(row(out, name, seeds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--from_teacher"]:
        sft_from_teacher(sys.argv[2:])
    else:
        options = parser("Distillation, GRPO and SFT by samples and seconds.")
        options.add_argument("--seeds", default="1,2,3,4,5")
        options.add_argument("--out_dir", default="out/distill", help="where the runs live")
        main(options.parse_args())
