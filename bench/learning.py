"""What GRPO adds to its warm start, compared with more SFT in the same time: tasks, loss types, seeds.

    python bench/learning.py                       everything that is not done yet; hours on two cores
    python bench/learning.py --only=addition --seeds=1 --jobs=1
    python bench/learning.py --logs=out/distill_1,out/distill_2      draws docs/teacher.png from these runs' logs

Runs train_sft.py and grpo.py as a user would and reads their logs. With --resume=auto the bench can be stopped and
started again at any time. --jobs runs go side by side, one thread each. Scores belong to the last weights, on 500
held-out prompts. The bench prints a table for docs/results.md. Without --only it also writes docs/learning.json, and
docs/learning.png with matplotlib (requirements-dev.txt).
"""

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common import HOME, chosen, commit, parser, result

from runs.log import read_log, values_of

# name: (SFT config, GRPO config, options of the GRPO run, seeds)
ADDITION = "config/sft_small", "config/grpo_small"
EXPERIMENTS = {
    "addition dapo": (*ADDITION, {}, (1, 2, 3, 4, 5)),
    "addition grpo": (*ADDITION, dict(loss_type="grpo"), (1, 2)),
    "addition dr_grpo": (*ADDITION, dict(loss_type="dr_grpo", scale_rewards="none"), (1, 2)),
    "addition cispo": (*ADDITION, dict(loss_type="cispo", epsilon_high=5), (1, 2)),
    "addition, hard": ("bench/configs/sft_hard", "bench/configs/grpo_hard", {}, (1, 2, 3)),
    "countdown": ("config/sft_countdown", "config/grpo_countdown", {}, (1, 2, 3, 4, 5)),
}
SCORES = ("pass_at_1", "pass_at_1_sampled")
LOGGED = ("reward_mean", "divergence", "completion_length_mean")
TINY = dict(max_iters=2, batch_size=2, eval_prompts=4, eval_interval=1)
limits = dict(end=float("inf"), options={})  # the time at which runs are stopped, and options of all of them


class OutOfTime(Exception):
    """A run was stopped at --seconds."""


def run(script, config, folder, options):
    """Start or continue a training run, unless it is done -> (log, seconds with start-up and evaluations)."""
    clock, done = folder / "bench_seconds", folder / "bench_done"
    if not done.exists():
        options = options | limits["options"] | {"out_dir": folder, "resume": "auto"}
        words = [f"--{name}={value}" for name, value in options.items()]
        started = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        command = [sys.executable, script, f"{config}.py", *words]
        try:
            follow(subprocess.Popen(command, cwd=HOME, stdout=subprocess.DEVNULL, env=environment), folder)
            done.touch()
        finally:  # also if the run was stopped half way
            if folder.exists():
                before = float(clock.read_text()) if clock.exists() else 0.0
                clock.write_text(f"{before + time.perf_counter() - started:.1f}")
    return read_log(folder), float(clock.read_text())


def follow(process, folder):
    """Wait for a run and print its scores as they come. Raises OutOfTime after --seconds, once the run has saved."""
    printed, stopped, code = 0, False, None
    try:
        while code is None:
            time.sleep(1)
            code = process.poll()  # before the log is read, so that nothing is missed
            log = read_log(folder) if (folder / "log.jsonl").exists() else []
            for seconds, score in curve(log)[printed:]:
                result(f"{folder.name}: held-out pass@1", score, seconds=seconds, iterations=len(log))
            printed = len(curve(log))
            if code is None and time.monotonic() > limits["end"]:
                stopped = True
                process.terminate()
    finally:
        process.kill()
    if stopped:
        raise OutOfTime
    if code:
        raise subprocess.CalledProcessError(code, process.args)


def folders(name, seed, out):
    """-> folders of the warm start, of GRPO and of more SFT. The loss types of a task share the first and the last."""
    *configs, options, _ = EXPERIMENTS[name]
    sft, grpo = (Path(config).name for config in configs)
    variant = options.get("loss_type", "dapo")
    return out / f"{sft}_{seed}", out / f"{grpo}_{variant}_{seed}", out / f"more_{sft}_{seed}"


def one(name, seed, out):
    """Run what is missing of one row."""
    sft, grpo, options, _ = EXPERIMENTS[name]
    warm, learned, more = folders(name, seed, out)
    sft_log, sft_seconds = run("train_sft.py", sft, warm, dict(seed=seed))
    _, seconds = run("grpo.py", grpo, learned, options | dict(seed=seed, init_from=warm))
    iterations = round(len(sft_log) * seconds / sft_seconds)
    if not (more / "bench_done").exists():  # of the first loss type that is run
        options = dict(seed=seed + 1000, init_from=warm, max_iters=iterations, eval_interval=100)
        run("train_sft.py", sft, more, options)  # fresh demonstrations


def run_chain(out, chain):
    """chain: ((SFT config, seed), names of rows)."""
    (_, seed), names = chain
    try:
        for name in names:
            one(name, seed, out)
    except OutOfTime:
        print("stopped after --seconds")


def row(name, seed, out):
    """-> the numbers of one row, or None where it is not done."""
    numbers = {}
    for what, folder in zip(("sft", "grpo", "more"), folders(name, seed, out), strict=True):
        if not (folder / "bench_done").exists():
            return None
        log = read_log(folder)
        numbers[what] = [log[-1][score] for score in SCORES] + [float((folder / "bench_seconds").read_text()), len(log)]
        numbers[f"{what}_curve"] = curve(log)
    return dict(name=name, seed=seed) | numbers


def curve(log):
    """-> [[seconds since the first iteration, pass@1], ...]"""
    seconds, points = 0.0, [[0.0, score] for iteration, score in values_of(log, SCORES[0]) if iteration < 0]
    for record in log:
        seconds += record["time_s"]
        if SCORES[0] in record:
            points.append([round(seconds, 1), record[SCORES[0]]])
    return points


def table(rows):
    lines = [
        "| task, loss | seed | after SFT | after GRPO | after more SFT instead | seconds: SFT, GRPO, more SFT |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = [f"{r[what][0]:.3f} ({r[what][1]:.3f})" for what in ("sft", "grpo", "more")]
        cells[1] = f"**{cells[1].replace(' ', '** ', 1)}"
        seconds = ", ".join(f"{r[what][2]:.0f}" for what in ("sft", "grpo", "more"))
        lines.append(f"| {r['name']} | {r['seed']} | {' | '.join(cells)} | {seconds} |")
    return "\n".join(lines)


def draw_logs(folders, path):
    """What training itself logs, by iteration: a line for each run."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LOGGED), figsize=(9.6, 2.8), layout="constrained")
    for name, panel in zip(LOGGED, panels, strict=True):
        for folder in folders:
            panel.plot(*zip(*values_of(read_log(folder), name), strict=True), label=folder)
        panel.set(title=name, xlabel="iteration", ylim=0)
    panel.legend()
    figure.savefig(path, dpi=110)


def draw(rows, path):
    """A panel for each task: pass@1 by seconds, GRPO in colour, more SFT in grey."""
    from matplotlib import pyplot

    names = list(dict.fromkeys(r["name"] for r in rows))
    lines = -(-len(names) // 3)
    figure, panels = pyplot.subplots(
        lines, 3, figsize=(9.6, 2.8 * lines), sharey=True, squeeze=False, layout="constrained"
    )
    for name, panel in zip(names, panels.flat, strict=False):
        for r in (r for r in rows if r["name"] == name):
            panel.plot(*zip(*r["more_curve"], strict=True), color="0.6", linewidth=1)
            panel.plot(*zip(*r["grpo_curve"], strict=True), color="C0", linewidth=1.5)
        panel.set(title=name, xlabel="seconds", ylim=(0, 1.03))
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels.flat[len(names) :]:
        panel.set_visible(False)
    figure.supylabel("held-out pass@1 (blue: GRPO, grey: SFT instead)", fontsize="medium")
    figure.savefig(path, dpi=110)


def main(arguments):
    if arguments.logs:
        draw_logs(arguments.logs.split(","), HOME / "docs/teacher.png")
        return
    out = Path(arguments.out_dir).absolute()
    wanted = {int(seed) for seed in arguments.seeds.split(",") if seed}
    names = [name for name in EXPERIMENTS if chosen(name, arguments.only)]
    pairs = [(name, seed) for name in names for seed in EXPERIMENTS[name][3] if not wanted or seed in wanted]
    if arguments.shapes == "tiny":
        limits["options"] = TINY
    if arguments.seconds:
        limits["end"] = time.monotonic() + arguments.seconds
    chains = {}  # rows that share a warm start go one after another
    for name, seed in pairs:
        chains.setdefault((EXPERIMENTS[name][0], seed), []).append(name)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        run_all = pool.map if arguments.jobs > 1 else map
        list(run_all(partial(run_chain, out), chains.items()))
    rows = [numbers for name, seed in pairs if (numbers := row(name, seed, out))]
    if not rows:
        print(f"no row is complete in {out}")
        return
    about = dict(commit=commit(), machine=platform.machine(), torch=torch.__version__, python=platform.python_version())
    about |= dict(jobs=arguments.jobs)
    print(table(rows))
    if not arguments.only and not wanted:
        (HOME / "docs/learning.json").write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n")
        draw(rows, HOME / "docs/learning.png")


if __name__ == "__main__":
    options = parser("SFT, GRPO, and more SFT instead.")
    options.add_argument("--seeds", default="", help="comma-separated; default: all seeds of a row")
    options.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    options.add_argument("--logs", default="", help="comma-separated folders of runs with a teacher: draw their logs")
    options.add_argument("--out_dir", default="out/learning", help="where the runs live")
    options.add_argument("--seconds", type=float, default=0, help="stop after that long; 0: no limit")
    main(options.parse_args())
