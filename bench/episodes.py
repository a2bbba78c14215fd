"""Episodes beside TRL's, on a CPU: a rollout of three turns with two calls of a tool, and the whole iteration.

    python bench/episodes.py [--trl_python=PATH] [--rounds=3] [--iterations=2] [--prompts=4] [--completions=8] ...
    python bench/episodes.py --wait    # snug alone: how many rows wait before their replies are read? (REPLY_AT)
    # PATH: the python of a copy of the virtual environment, where TRL is: pip install trl==1.16.0

snug keeps a row's KV cache and reads a reply behind it. TRL without a server generates each turn again from the whole
conversation. Both train SmolLM2-135M-Instruct (`make models/smollm2-135m-instruct`) on the same prompts with the same
tool, rewards and chat template, each in a process, in turns. The first iteration of a process is not timed.

A model calls tools when it likes. So a script has the turns: every pass runs and every distribution is computed, but
the token is the script's. In snug's table of uniform numbers are ids; in TRL a logits processor leaves one token. The
bench fails unless both have the same prompts, completions and masks of sampled tokens.

Positions are tokens that went into the model, with padding and idle rows: read (prompts and replies; in TRL the whole
conversation), decoded one by one, and in training. All turns have the same length, which is kind to TRL: no row waits
or is padded. With --wait their text has a geometric length.

prompt     tokens of a prompt, with the tool                       turn       tokens of a turn
reply      words in a reply; the template adds ten tokens          sequences  TRL's micro-batch; snug's has its tokens
"""

import argparse
import contextlib
import io
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from common import DEVICE, HOME, clocked, in_a_process, median_result, ratio_result
from iteration import ITERATIONS, make_trainer, prepared_run, transformers_model, watched

import grpo
import sample
from data.tools import schema_of
from model import GPT
from runs.log import read_log
from snug.decoding import decode_batch, draw
from snug.device.pick import pick_device
from snug.tokenizer import get_tokenizer

TURNS = 3
SIZES = "rounds=3 iterations=2 prompts=4 completions=8 prompt=120 turn=40 reply=10 sequences=8"
SHARES = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
WORDS = ("river", "stone", "garden", "winter", "silver", "window", "music", "paper", "summer", "yellow")  # a token each
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\nTools:\n' }}{%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}
{{- 'Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
positions = Counter()


def get(key: str) -> str:
    """Get a text.

    Args:
        key: its name
    """
    return words(random.Random(key), int(key.rpartition("-")[2]))


def words(rng, n):
    return "".join(f" {word}" for word in rng.choices(WORDS, k=n))


def count(tokens):
    """tokens (B, T) go into the model now."""
    kind = "in training" if torch.is_grad_enabled() else "read" if tokens.shape[1] > 1 else "decoded"
    positions[kind] += tokens.numel()


def make_folder(folder, options):
    """The model with a template for tools, and prompts."""
    (folder / "model").mkdir()
    for path in Path(options.model).resolve().iterdir():
        (folder / "model" / path.name).symlink_to(path)
    (folder / "model/chat_template.jinja").unlink(missing_ok=True)
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    tokenizer, rng = get_tokenizer(str(folder / "model")), random.Random(0)
    tokenizer.chat.tools = [schema_of(get)]
    n = options.prompt - len(tokenizer.encode_prompt([dict(role="user", content="")]))
    if n < 4:
        raise SystemExit(
            f"--prompt={options.prompt}: template and tool take {options.prompt - n}, and a text at least 4"
        )
    lines = (json.dumps(dict(prompt=words(rng, n))) + "\n" for _ in range(200))
    (folder / "prompts.jsonl").write_text("".join(dict.fromkeys(lines)))


def make_script(tokenizer, options):
    """-> of each row [ids of a turn, of the reply, of a turn, ...]."""
    script, geometric = [], math.log(options.turn / (options.turn - 1))
    for row in range(options.prompts * options.completions):
        rng, pieces = random.Random(row), []
        for turn in range(TURNS):
            n = 1 + int(rng.expovariate(geometric)) if options.wait else options.turn
            call = dict(name="get", arguments=dict(key=f"{row}-{turn}-{options.reply}"))
            ids = tokenizer.encode(f"<tool_call>{json.dumps(call)}</tool_call>")
            ids = [] if options.wait or turn == TURNS - 1 else ids
            text = words(rng, max(n - len(ids) - 1, 0))
            answer = dict(role="tool", content=get(**call["arguments"]))
            pieces += [tokenizer.encode(text) + ids + [tokenizer.stop_token], tokenizer.encode_reply([answer], True)]
        script.append(pieces[:-1])
    return script, max(len(sum(row, [])) for row in script)


def follow(script, longest):
    """Let snug draw the script's tokens, and count what it computes."""
    rows, forward = [sum(row, []) for row in script], GPT.forward
    table = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.float32)
    sample.uniforms, draw.draw_torch = lambda *_: table.numpy(), draw_scripted
    GPT.forward = lambda model, tokens, *args, **kwargs: count(tokens) or forward(model, tokens, *args, **kwargs)


def draw_scripted(model, hidden, u, temperature, tokens, logprobs):
    """snug.decoding.draw.draw_torch, but u is the token: all of its work except the search."""
    logp = torch.log_softmax(model.logits(hidden).float(), -1)
    logp.exp().cumsum_(-1)
    tokens.copy_(u)
    torch.gather(logp, -1, tokens[:, None], out=logprobs[:, None])


def run_snug(prepared, script):
    """-> (a line for each iteration, [prompt, completion, mask] of each row)."""
    rows, sample_groups = [], sample.sample_groups

    def recorded(*args, **kwargs):
        rollouts = sample_groups(*args, **kwargs)
        columns = (rollouts.tokens, rollouts.mask, rollouts.prompt_lengths, rollouts.completion_lengths)
        for ids, mask, start, n in zip(*(column.tolist() for column in columns), strict=True):
            rows.append([ids[:start], ids[start:][:n], mask[:n]])
        return rollouts

    sample.sample_groups = recorded
    follow(script, prepared.settings.max_new_tokens)
    grpo.main(prepared)
    return read_log(prepared.settings.out_dir), rows


def run_trl(prepared, script, sequences):
    """-> the same."""
    from trl.chat_template_utils import qwen3_template

    rows, turns, step = [], [], 0
    model = transformers_model(prepared.settings.init_from, "float32")
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: count(inputs[0]))
    # how TRL reads calls; it knows only the templates of some models
    trainer = make_trainer(prepared, model, sequences, ITERATIONS, response_template=qwen3_template, tools=[get])
    stop = trainer.processing_class.eos_token_id
    generate, one_turn, all_turns = model.generate, trainer._generate_single_turn, trainer._generate

    def forced(input_ids, scores):
        nonlocal step
        ids = [row[2 * len(turns) - 2][step : step + 1] or [stop] for row in script]
        step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, torch.tensor(ids, device=scores.device), 0.0)

    def next_turn(*args, **kwargs):
        nonlocal step
        step = 0
        turns.append(args)
        return one_turn(*args, **kwargs)

    def recorded(*args, **kwargs):
        turns.clear()
        returned = all_turns(*args, **kwargs)
        rows.extend(zip(*returned[:3], strict=True))  # prompts, completions, masks
        return returned

    model.generate = lambda **kwargs: generate(**kwargs, logits_processor=[forced])
    trainer._generate_single_turn, trainer._generate = next_turn, recorded
    lines = watched(trainer)
    trainer.train()
    return lines, rows


def arm(options, folder):
    """-> a contender's rows, and its figures of an iteration."""
    script, longest = make_script(get_tokenizer(f"{folder}/model"), options)
    given = [f"--init_from={folder}/model", "--task=jsonl", f"--data_file={folder}/prompts.jsonl", "--chat=true"]
    given += [f"--batch_size={options.prompts}", f"--group_size={options.completions}", f"--max_new_tokens={longest}"]
    given += [f"--max_tokens_per_micro_batch={options.sequences * (options.prompt + longest)}", "--beta=0"]
    given += ["--tools=bench.episodes:get", "--learning_rate=1e-6"]
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as out_dir:
        prepared = prepared_run(given, 1, out_dir)
        snug = options.arm == "snug"
        lines, rows = run_snug(prepared, script) if snug else run_trl(prepared, script, options.sequences)
    positions["in sampling"] = positions["read"] + positions["decoded"]
    figures = {f"positions {kind}": n / ITERATIONS for kind, n in positions.items()}
    for name, key in (("rollout, s", "time_rollout_s"), ("iteration, s", "time_s")):
        figures[name] = statistics.median(line[key] for line in lines[1:] or lines)
    return rows, figures | {"peak resident, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def compare(options):
    rounds, rows = dict(snug=[], TRL=[]), []
    if subprocess.run([options.trl_python, "-c", "import trl"], capture_output=True).returncode:
        print(f"{options.trl_python} has no TRL: only snug is measured; --trl_python=PATH names another python")
        del rounds["TRL"]
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), options)
        for number in range(options.rounds):
            for who in rounds:
                own, python = (
                    [f"--arm={who}", f"--folder={folder}"],
                    dict(TRL=options.trl_python).get(who, sys.executable),
                )
                theirs, figures = in_a_process(__file__, *sys.argv[1:], *own, python=python)
                rounds[who].append(figures)
                rows.append(theirs)
                print(f"round {number + 1}, {who}: {figures['iteration, s']:.3f} s", flush=True)
    if any(each != rows[0] for each in rows):  # masks too: in both a reply begins behind the stop token
        raise SystemExit("the processes differ in prompts, completions or masks")
    prompt, completion, mask = rows[0][0]
    size = f"{len(prompt)} tokens of prompt, {sum(mask)} sampled, {len(completion) - sum(mask)} of replies"
    print(f"{len(rows[0])} rows, the same in {len(rows)} processes; the first: {size}")
    for name in rounds["snug"][0]:
        ours, *theirs = [[figures[name] for figures in lines] for lines in rounds.values()]
        print(
            f"{name:24}",
            *(f"{who} {statistics.median(x):10,.6g} " for who, x in zip(rounds, [ours, *theirs], strict=True)),
        )
        for values in theirs:
            ratio_result(f"{name}: TRL / snug", values, ours)


def wait(options):
    """Rollouts for each share of rows that must wait before replies are read. The shares take turns."""
    pick_device(DEVICE)
    model, tokenizer = GPT.from_pretrained(options.model, DEVICE, "float32").eval(), get_tokenizer(options.model)
    script, longest = make_script(tokenizer, options)
    follow(script, longest)
    prompts = [tokenizer.encode(words(random.Random(i), options.prompt)) for i in range(options.prompts)]
    seconds = {share: [] for share in SHARES}

    def rollout():
        replies = [iter(row[1::2]) for row in script]
        stops = dict(stop_token=tokenizer.stop_tokens, respond=lambda row, ids: next(replies[row], None))
        return sample.sample_groups(model, prompts, options.completions, longest, **stops)

    for number in range(-1, options.rounds):  # the first round is not counted
        for share in SHARES:
            decode_batch.REPLY_AT[DEVICE] = share
            positions.clear()
            seconds[share].append(clocked(rollout)[1])
            if number < 0:
                print(f"wait for {share:<6}  positions: {dict(positions)}", flush=True)
    for share in SHARES:
        median_result(f"wait for {share}: rollout", seconds[share][1:], "s")
        ratio_result(f"wait for {share}: seconds / those of 1/8", seconds[share][1:], seconds[1 / 8][1:])


if __name__ == "__main__":
    known = argparse.ArgumentParser(description="Episodes with a tool, beside TRL's.")
    known.add_argument("--trl_python", default=sys.executable, help="a python that has TRL")
    known.add_argument("--model", default=str(HOME / "models/smollm2-135m-instruct"), help="a folder; reads ChatML")
    known.add_argument("--wait", action="store_true", help="measure REPLY_AT")
    for size in SIZES.split():
        known.add_argument(f"--{size.partition('=')[0]}", type=int, default=size.partition("=")[2])
    known.add_argument("--arm", help="used by the bench itself, and so is the next")
    known.add_argument("--folder")
    options = known.parse_args()
    os.environ["BENCH_ITERATIONS"] = str(options.iterations)  # of the processes, see iteration.py
    if options.arm:
        print(json.dumps(arm(options, options.folder)))
    else:
        wait(options) if options.wait else compare(options)
