"""Every option is what it says, and whatever is wrong with one is said in one line, before anything runs."""

import ast
import inspect
import math
import pickle
import re
from pathlib import Path

import pytest

from data import TASKS
from helpers.errors import assert_refused
from helpers.files import source_files
from helpers.runs import refused
from helpers.tasks import COUNTDOWN
from runs.fork import ForkSettings
from runs.prepare import prepare
from settings import RULES, EvaluateSettings, ExportSettings, GRPOSettings, SampleSettings, SFTSettings
from snug import options
from snug.options import fields, make_settings, read_settings

CLASSES = (SFTSettings, GRPOSettings, SampleSettings, EvaluateSettings)
EVERY_OPTION = [(cls, name) for cls in (*CLASSES, *map(GRPOSettings.with_task, TASKS)) for name in options.fields(cls)]


def read_value(cls, name, text):
    return options.check_value(cls, name, options.parse_value(cls, name, text), f"--{name}")


def read_config(cls, path):
    """Only the config's own values, though they may not fit together."""
    given = options.read_config(path)
    cls = options.class_of(cls, given)
    return {name: options.check_value(cls, name, value, where) for name, (where, value) in given.items()}


def config(tmp_path, text):
    path = tmp_path / "config.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_go_through_a_config_and_the_command_line(cls, tmp_path):
    assert read_settings(cls, [], positional="folder") == (cls(), set(), "")
    values = vars(cls())
    assert read_config(cls, config(tmp_path, "".join(f"{name} = {v!r}\n" for name, v in values.items()))) == values
    for name, value in values.items():
        assert len(options.fields(type(cls()))[name].metadata["meaning"]) > 5
        read = read_value(type(cls()), name, ",".join(value) if isinstance(value, list) else str(value))
        assert read == value and type(read) is type(value)


def test_every_option_is_read_somewhere():
    """As settings.name, self.settings.name, options.name, s.name, or, of a model's own, config.name."""
    read = set()
    for path in source_files().values():
        for node in ast.walk(ast.parse(path.read_text())) if path.parent.name != "settings" else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner in ("c", "s", "config") or owner.endswith(("settings", "options")):
                    read.add(node.attr)
    unread = {name for _, name in EVERY_OPTION} - read
    assert not unread, f"options that nothing reads: {', '.join(sorted(unread))}"


WRONG = {  # of a type: values of other types
    bool: [None, 1, "true", [True]], int: [None, True, 2.5, "3", [3]], float: [None, True, "2.5", [2.5], 1j],
    str: [None, True, 3, b"bytes", ["a"]], dict: [None, 1, "{}", ["a"]], list[str]: [None, "a", [1], {"a": 1}, {"a"}],
    list[float]: [None, 1.0, ["a"], [None], [True]],
}  # fmt: skip


def test_a_config_value_of_the_wrong_type_is_refused(tmp_path):
    for name in options.fields(GRPOSettings):
        kind, optional = options.type_of(GRPOSettings, name)
        for value in WRONG[kind][optional:]:
            path = config(tmp_path, f"{name} = {value!r}\n")
            assert f"{path}:1: {name} takes" in refused(read_config, GRPOSettings, path)


def test_limits_of_numbers():
    numeric = [(cls, name) for cls, name in EVERY_OPTION if options.type_of(cls, name)[0] in (int, float)]
    for cls, name in numeric:
        kind, limits = options.type_of(cls, name)[0], options.fields(cls)[name].metadata
        minimum, maximum = limits["minimum"], limits["maximum"]
        for limit in {minimum, maximum} - {math.inf}:
            assert read_value(cls, name, str(limit)) == limit
        bad = [minimum - (1 if kind is int else 1e-6), *([kind(maximum + 1)] if maximum < math.inf else [])]
        for value in [*bad, *([math.nan, -math.inf, math.inf] if kind is float else [])]:
            assert f"--{name}={value} is not from {minimum} to {maximum}" in refused(read_value, cls, name, str(value))


def test_other_words_than_the_choices_are_refused():
    for cls, name in EVERY_OPTION:
        choices = options.fields(cls)[name].metadata["choices"]
        for choice in choices:
            assert read_value(cls, name, choice) in (choice, [choice])
        if choices:
            message = refused(read_settings, cls, [f"--{name}={choices[1]}e"])
            assert f"{choices[1]}e' is not one of {', '.join(choices)}; did you mean {choices[1]}?" in message
            assert "did you mean" not in refused(read_settings, cls, [f"--{name}=@"])


@pytest.mark.parametrize("cls", CLASSES)
def test_an_unknown_option_is_answered_with_the_nearest(cls, tmp_path):
    assert refused(read_settings, cls, ["--sede=1"]) == "unknown option --sede; did you mean seed?"
    assert refused(read_settings, cls, ["--see=1"]) == "unknown option --see; did you mean seed?"  # no abbreviations
    of_task = ", with --task=NAME its own too" if "task" in fields(cls) else ""
    assert refused(read_settings, cls, ["--qqq=1"]) == f"unknown option --qqq; --help=all lists all options{of_task}"
    path = config(tmp_path, "'''why'''\n\nsede = 3\n")
    assert refused(read_config, cls, path) == f"unknown option {path}:3: sede; did you mean seed?"


def test_another_tasks_option_is_answered_with_the_tasks(tmp_path):
    for cls in (SFTSettings, GRPOSettings, EvaluateSettings):
        said = "; it is an option of --task=gsm8k or jsonl"
        assert refused(read_settings, cls, ["--task=addition", "--data_file=3"]) == f"unknown option --data_file{said}"
        path = config(tmp_path, "digits = 1\ntask = 'jsonl'\n")
        said = f"unknown option {path}:1: digits; it is an option of --task=addition"
        assert refused(make_settings, cls, path, {}) == said
    text = "countdown_numbers = '3'\ntask = 'examples.countdown:Countdown'\ncountdown_max_number = 9\n"  # in any order
    settings, names, _ = read_settings(GRPOSettings, [config(tmp_path, text), "--countdown_numbers=4"])
    assert (settings.countdown_numbers, settings.countdown_max_number) == ("4", 9) and len(names) == 3


def test_names_of_trl_are_answered_with_ours(tmp_path):
    for cls in (SFTSettings, GRPOSettings):
        for word, ours in {
            "--num_generations=8": "group_size",
            "--per_device_train_batch_size=8": "batch_size, in prompts, not completions", "--bf16": "dtype=bfloat16",
            "--config=config/grpo_small.py": "the first word, without dashes, such as config/grpo_small.py",
        }.items():  # fmt: skip
            assert refused(read_settings, cls, [word]) == f"unknown option {word.split('=')[0]}; here it is {ours}"
        path = config(tmp_path, "max_steps = 3\n")
        assert refused(read_config, cls, path) == f"unknown option {path}:1: max_steps; here it is max_iters"
    # What is here not by an option's name: places, and values of options.
    no_options = "config countdown lookup reasoning_gym code all-linear o_proj down_proj constant_with_warmup".split()
    known = options.fields(GRPOSettings.with_task("jsonl"))
    of_commands = {name for _, name in EVERY_OPTION}
    for theirs, answer in options.ELSEWHERE.items():
        assert theirs not in known and set(re.findall(r"--(\w+)", answer)) <= of_commands
        if here := re.match(r"here it is (\w+)(?:=(\w+))?", answer):
            name, value = here.groups()
            assert name in known or theirs in no_options
            assert not value or read_settings(GRPOSettings, ["--seed=3", f"--{name}={value}"])
        else:
            assert re.match(r"not needed: |not there: |.*\w+_proj and \w+_proj are one matrix here", answer)


def test_other_words_for_values_are_answered():
    one = "are one matrix here, with one adapter: write"
    for option, theirs, answer in (
        ("lora_target_modules", "q_proj", f"q_proj, k_proj and v_proj {one} qkv"),
        ("lora_target_modules", "up,gate_proj", f"gate_proj and up_proj {one} up"),
        ("lora_target_modules", "all-linear", "here it is qkv,proj,up,down"),
        ("dtype", "bf16", "here it is dtype=bfloat16"), ("lr_schedule", "constant_with_warmup", "here it is constant"),
    ):  # fmt: skip
        assert refused(read_value, GRPOSettings, option, theirs).endswith(f"; {answer}")
    assert "the range of float16 is too small" in refused(read_value, GRPOSettings, "dtype", "fp16")
    assert read_value(SampleSettings, "prompt", "bf16") == "bf16"  # text is text


def test_ways_to_write_a_value():
    def read(cls, *words):
        return read_settings(cls, words)[0]

    for text in ("a=b", "a b", "--help", "-1+2=", ""):
        assert read(SampleSettings, f"--prompt={text}").prompt == text
    assert read(SampleSettings, "--prompt", "a b").prompt == "a b"
    assert read(SFTSettings, "--seed", "3", "--seed=4").seed == 4  # the last one holds
    assert type(read(SFTSettings, "--learning_rate=1").learning_rate) is float
    assert read(SFTSettings, "--plan=true").plan is read(SFTSettings, "--plan=1").plan is True
    for text in ("False", "false", "0"):
        assert read(SFTSettings, "--plan", f"--tie_embeddings={text}").tie_embeddings is False
    assert read(GRPOSettings, "--reward_funcs=a:b, c.d:e").reward_funcs == ["a:b", "c.d:e"]
    assert read(GRPOSettings, "--reward_funcs=").reward_funcs == []
    assert read(GRPOSettings, "--reward_funcs=a:b", "--reward_weights=2").reward_weights == [2.0]
    assert read(GRPOSettings, "--epsilon_high=0.28").epsilon_high == 0.28
    assert read(GRPOSettings, "--epsilon_high=none").epsilon_high is None
    assert GRPOSettings().reward_funcs is not GRPOSettings().reward_funcs  # no list that is shared


def test_wrong_command_lines(tmp_path, monkeypatch):
    for line, message in {
        "--seed": "--seed has no value; options are written --name=value",
        "--seed --digits=3": "--seed has no value; options are written --name=value",
        "--seed=1.5": "--seed takes a whole number, not '1.5'", "--plan=yes": "--plan takes true or false, not 'yes'",
        "--learning_rate=none": "--learning_rate takes a number, not 'none'",
        "a.py --seed=2 b.py": "one argument too many: b.py; options are written --name=value",
    }.items():  # fmt: skip
        assert refused(read_settings, SFTSettings, line.split()) == message
    assert_refused("one argument too many: b;", read_settings, SampleSettings, ["a", "b"], positional="folder")
    monkeypatch.chdir(tmp_path)
    assert refused(read_settings, SFTSettings, ["nope.py"]) == "config nope.py: No such file or directory"
    Path("config").mkdir()
    Path("config/sft_small.py").write_text("seed = 9\n")
    assert refused(read_settings, SFTSettings, ["config/sft_smal.py"]).endswith("did you mean config/sft_small.py?")
    assert "config config: Is a directory" in refused(read_settings, SFTSettings, ["config"])


def test_the_command_line_overrides_the_config(tmp_path):
    path = config(tmp_path, '"""A motive."""\nseed = 5\ndigits = 2\n')
    for words in (["--seed=6", path, "--batch_size=4"], ["--plan", path, "--seed=6", "--batch_size=4"]):
        result, given_names, place = read_settings(SFTSettings, words)
        assert (result.seed, result.digits, result.batch_size, result.plan) == (6, 2, 4, "--plan" in words)
        assert given_names - {"plan"} == {"seed", "digits", "batch_size"} and place == path
    result, given_names, place = read_settings(SampleSettings, ["out/no_such_run", "--seed=2"], positional="folder")
    assert (result.seed, given_names, place) == (2, {"seed"}, "out/no_such_run")  # a folder is not read


@pytest.mark.parametrize("cls", CLASSES)
def test_help_shows_every_option_once_with_its_default(cls, capsys):
    with pytest.raises(SystemExit) as caught:
        read_settings(cls, ["--seed=2", "--help=all"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("-\n", "-").split())
    assert shown.startswith("usage: ") and " ".join(cls.__doc__.split()) in shown
    for name, field in options.fields(cls).items():
        assert name == "plan" or shown.count(f" --{name} ") == 1  # other texts name --plan
        text = shown.rpartition(f" --{name} ")[2].replace("- ", "-")
        meant = f"{field.metadata['meaning']} (default: {vars(cls())[name]!r})"
        assert meant.replace("- ", "-") in text
    assert (" Run: Where a run starts" in shown) == (" --init_from " in shown)


@pytest.mark.parametrize("cls", [*CLASSES, ForkSettings, ExportSettings])
def test_help_shows_the_usual_options_by_topic_in_80_columns(cls, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["grpo.py"])
    with pytest.raises(SystemExit) as caught:
        read_settings(cls, ["-h"], positional="run")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    cls = type(cls())
    usual = [*cls.usual.split(), *options.fields(cls.own_options)] if hasattr(cls, "usual") else [*options.fields(cls)]
    assert set(usual) <= set(options.fields(cls)) and len(usual) <= 25
    shown = [line.split()[0].removeprefix("--") for line in lines if line.startswith("  --")]
    assert sorted(shown) == sorted(usual) and max(map(len, lines)) <= 80
    left = len(options.fields(cls)) - len(usual)
    assert (lines[-1] == f"{left} more options: --help=all") if left else "--help=all" not in lines[-1]
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert ("Memory:" in headings) == ("plan" in usual)
    assert "Gym:" not in headings and len(set(headings)) == len(headings)  # no topic without an option
    own = next(iter(inspect.get_annotations(cls.without_task if hasattr(cls, "without_task") else cls)))
    assert f"  --{own} " in out.partition(f"\n{cls.__name__.removesuffix('Settings')}:\n")[2].partition("\n\n")[0]
    assert out.startswith("usage: python grpo.py [run] [--name=value ...]\n")


def test_a_config_is_assignments_of_literals(tmp_path):
    text = """
'''Why these.'''
learning_rate = 1  # a whole number serves
epsilon_high = None
reward_funcs = ('a:b', "c:d")
reward_weights = [1, 0.5]
seed = 0x10
task = "examples.countdown:Countdown"
countdown_operators = '+' '-'
"""
    values = read_config(GRPOSettings, config(tmp_path, text))
    expected = dict(learning_rate=1.0, epsilon_high=None, reward_funcs=["a:b", "c:d"], reward_weights=[1.0, 0.5])
    assert values == expected | dict(seed=16, task=COUNTDOWN, countdown_operators="+-")
    assert type(values["learning_rate"]) is type(values["reward_weights"][0]) is float
    assert type(values["reward_funcs"]) is list
    assert read_config(GRPOSettings, config(tmp_path, "")) == {}


def test_a_config_is_utf_8_with_a_mark_or_without_and_the_line_of_another_letter_is_named(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes("seed = 3\nout_dir = 'é'\n".encode("utf-8-sig"))
    assert read_config(GRPOSettings, str(path)) == dict(seed=3, out_dir="é")
    path.write_bytes("seed = 3\nout_dir = 'é'\n".encode("latin1"))
    said = refused(read_config, GRPOSettings, str(path)).lower()  # in the words of this version of Python
    assert "utf-8" in said and "xe9" in said and "line 2" in said
    path.write_text(f"learning_rate = {10**400}")
    assert refused(read_config, SFTSettings, str(path)) == f"{path}:1: learning_rate=inf is not from 0 to inf"


@pytest.mark.parametrize(
    "line",
    [
        *["import os; os.mkdir('touched')", "open('touched', 'w')", "seed = open('touched', 'w')"],
        *["def seed(f=open('touched', 'w')): pass", "class seed: x = open('touched', 'w')"],
        *["out_dir = f\"{open('touched', 'w')}\"", "seed = digits", "seed = 2 ** 99999999", "seed: int = 3"],
        *["seed += 1", "seed = digits = 1", "seed, digits = 1, 2", "settings.seed = 3", "(seed := 3)", "seed = {[]}"],
        *["seed = '", "seed = 1\x00", "seed = " + "9" * 5000, "seed = " + "(" * 500, "seed = '\udcff'"],
    ],
)
def test_a_config_is_never_executed(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_bytes(line.encode(errors="surrogateescape") + b"\n")
    assert "config.py" in refused(read_config, GRPOSettings, "config.py")
    assert not Path("touched").exists()


REFUSED = {
    "--train_batch_size=100": "does not divide the 1024 completions of a rollout",
    "--loss_type=cispo": "loss_type=cispo needs epsilon_high of at least 1, not None; try --epsilon_high=5",
    "--loss_type=cispo --epsilon_high=0.5": "loss_type=cispo needs epsilon_high of at least 1, not 0.5",
    "--loss_type=luspo": "loss_type=luspo does not support importance_sampling_level=token; use --importance_sampling_level",
    "--reward_coef=0": "teacher=none does not support reward_coef=0.0; use --reward_coef=1.0, or another teacher",
    "--reward_weights=1 --reward_funcs=m:f,m:g": "reward_weights has 1 weights for 2 reward_funcs",
    "--base_dtype=nf4": "lora_rank=none does not support base_dtype=nf4; use --base_dtype=, or another lora_rank",
    "--base_dtype=nf4 --lora_rank=4 --init_from=x --parallel=fsdp": "parallel=fsdp does not support base_dtype=nf4; use --base_dtype=",
    "--lora_rank=4": "init_from=none does not support lora_rank=4",
    "--group_size=1 --teacher=x": "group_size=1 does not support reward_coef=1.0; use --reward_coef=0.0",
}


@pytest.mark.parametrize("words, message", REFUSED.items())
def test_combinations_that_cannot_be(words, message):
    assert message in refused(read_settings, GRPOSettings, words.split())


def test_rules_name_options_and_values_that_there_are():
    """And SFT, which lacks many of them, breaks none."""
    for given, given_value, needs in RULES:
        for name, value in {given: given_value, **needs}.items():
            assert options.check_value(GRPOSettings, name, value, name) == value
    SFTSettings(parallel="fsdp").check()
    message = refused(SFTSettings(parallel="fsdp", grad_offload=True).check)
    assert message == "parallel=fsdp does not support grad_offload=True; use --grad_offload=False, or another parallel"


NAMED = [  # words, the option that has to be named, values of {n}: refused where a run is prepared
    ("--n_embd={n} --n_head=7", "n_head", [15, 64]), ("--n_head=6 --n_embd=96 --n_kv_head={n}", "n_kv_head", [4, 7]),
    ("--memory_budget_gb={n}", "memory_budget_gb", ["-1", "much", "nan", "inf", "8GB"]),
    ("--task=examples.countdown:Countdown --countdown_numbers={n}", "countdown_numbers", [1, 11, "4-3"]),
    ("--task=examples.countdown:Countdown --countdown_operators={n}", "countdown_operators", ["", "%", "+-^", "plus"]),
    ("--task=examples.countdown:Countdown --countdown_numbers=2 --countdown_max_number={n}", "countdown", [2]),
    ("--report_to={n}", "report_to", ["mlflow", "wandb,none"]), ("--vocab_size={n}", "vocab_size", [1, 256]),
    ("--block_size={n}", "block_size", [2, 24]), ("--digits={n}", "digits", [1001]),
    ("--task=jsonl --digits={n}", "digits", [3]), ("--data_file=rows{n}.jsonl", "data_file", [1]),
    ("--task=jsonl --data_file=no/such/file{n}.jsonl", "no/such/file", [1]),
    ("--system_prompt={n}", "system_prompt", ["Be brief."]),
    ("--out_dir=out/x{n} --init_from=out/x{n}", "init_from", [1]),
]  # fmt: skip
NAMED_GRPO = [
    ("--group_size={n}", "group_size", [1]), ("--train_batch_size={n}", "train_batch_size", [3, 2048]),
    ("--reward_funcs={n}", "reward_funcs", "short a: :b no_such_module:f json:no_such os:name".split() + ["a b:c"]),
    ("--beta={n}", "beta", [0.001]), ("--max_new_tokens={n}", "max_new_tokens", [64, 999]),
    ("--max_prompt_length={n}", "block_size", [33, 99]),
]  # fmt: skip


ALL = [(GRPOSettings, *case) for case in NAMED + NAMED_GRPO] + [(SFTSettings, *case) for case in NAMED]


@pytest.mark.parametrize("cls, text, name, values", ALL)
def test_what_cannot_be_is_refused_by_name(cls, text, name, values):
    for value in values:
        words = [word.replace("{n}", str(value)) for word in text.split()]  # the value may have spaces
        assert name in refused(lambda words=words: prepare(*read_settings(cls, words)[:2]))


def test_options_go_to_other_processes():
    """Their class is made while snug runs; processes send each other what they chose."""
    settings = GRPOSettings(task=COUNTDOWN, max_iters=7)
    sent = pickle.loads(pickle.dumps(settings))
    assert type(sent) is type(settings) and vars(sent) == vars(settings)


def test_an_option_of_a_task_may_have_a_space_before_its_value():
    """The task is known only after all words are read."""
    words = ["--data_file", "p.jsonl", "--seed", "3", "--drop_long_prompts", "--task=jsonl"]
    settings, given, config = read_settings(SFTSettings, words)
    assert (settings.data_file, settings.seed, settings.drop_long_prompts, config) == ("p.jsonl", 3, True, "")
    assert given == {"data_file", "seed", "drop_long_prompts", "task"}
