"""Commands in a process of their own, those that texts have, and configs that run in a second."""

import ast
import os
import re
import shlex
import subprocess
import sys

from helpers import HOME
from snug.options import read_config

CONFIGS = sorted(HOME.glob("config/*.py"))


def python(*words, cwd=HOME, **environment):
    """Run Python with these words -> the process that ended, with its output. environment: what differs from ours."""
    command, its = [sys.executable, *words], os.environ | environment
    return subprocess.run(command, cwd=cwd, env=its, capture_output=True, text=True)


def commands_in(text):
    """Yield the command lines of a text: lines, also after a prompt, and code within a sentence."""
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        for code in [re.sub(r"^\s*(\$|next|srun)? *(\.venv/bin/)?", "", line), *re.findall(r"`([^`]+)`", line)]:
            if re.match(r"(python3?(?! -m pip)|make|torchrun(?= --)) ", code) and "$(" not in code:
                yield tidy(code)


def tidy(line):
    """Without comments, pipes and remarks in another column. [--option] is given. <run> is one of ours."""
    line = re.sub(r"\s(#|\||&).*|\s{3,}[a-zA-Z0-9\"].*$", "", line.strip())
    line = re.sub("^python3 ", "python ", line)
    line = re.sub(r"\s*\[(--[^\]|]+)\]", r" \1", line)
    line = re.sub(r"\s*\[[^\]]*\]|\s\.\.\.", "", line)
    names = {"<run>": "grpo_small", "<other>": "sft_small", "$SLURM_NNODES": "4", "$head": "HOST", "$SLURM_JOB_ID": "1"}
    for name, value in names.items():
        line = line.replace(name, value)
    return " ".join(shlex.quote(word) if " " in word else word for word in shlex.split(line))


def block_with(document, words):
    """The block of Python in a document that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", (HOME / document).read_text(), re.DOTALL)
    return next(block for block in blocks if words in block)


def docstring_of(path):
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def script_of(config):
    return "train_sft.py" if config.name.startswith("sft") else "grpo.py"


def values_of(config):
    return {name: value for name, (_, value) in read_config(str(config)).items()}


def command_of(config):
    """The command that starts a config: its docstring may say what it needs. It trains; it does not plan."""
    lines = [line for line in commands_in(docstring_of(config)) if config.name in line]
    line = next(iter(lines), f"python {script_of(config)} config/{config.name}")
    return re.sub(" --plan.*", "", line)


def shrunk(config):
    """The text of a config, and lines that shrink it."""
    values = values_of(config)
    small = dict(max_iters=1, batch_size=2, eval_prompts=2, eval_interval=1, save_interval=0, device="cpu")
    if script_of(config) == "grpo.py":
        k = min(values.get("group_size", 2), 2)
        small |= dict(group_size=k, batch_size=4 // k, max_new_tokens=8)
    if "init_from" not in values and "--init_from" not in command_of(config):
        small |= dict(n_layer=1, n_embd=16, n_head=4)
        small |= {name: value for name, value in dict(n_kv_head=2, n_hidden=32, vocab_size=0).items() if name in values}
    lines = [f"{name} = {value!r}\n" for name, value in small.items()]
    return config.read_text() + "\n" + "".join(lines)
