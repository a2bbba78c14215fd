"""Every option is what it says, and whatever is wrong with one is said in one line, before anything runs."""

import ast
import dataclasses
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import refuse
from hypothesis import given
from hypothesis import strategies as st

import options
import settings
from options import SnugError, read_config, read_settings
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, ModelOptions, ReplaySettings, SampleSettings, SFTSettings

CLASSES = (SFTSettings, GRPOSettings, SampleSettings, EvaluateSettings, ReplaySettings)
EVERY_OPTION = [(cls, name) for cls in CLASSES for name in options.fields(cls)]
ROOT = Path(settings.__file__).parent


def refused(function, *args):
    """The message of the SnugError that function(*args) raises: one line."""
    with pytest.raises(SnugError) as caught:
        function(*args)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def config(tmp_path, text):
    path = tmp_path / "config.py"
    path.write_text(text)
    return str(path)


# -----------------------------------------------------------------------------
# The options themselves


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_pass_their_own_checks(cls):
    result, given_names, place = read_settings(cls, [])
    assert (result, given_names, place) == (cls(), set(), "")
    for name in options.fields(cls):
        value = getattr(result, name)
        assert options.check_value(cls, name, value, name) == value
        assert type(options.check_value(cls, name, value, name)) is type(value)


@pytest.mark.parametrize("cls, name", EVERY_OPTION)
def test_every_option_has_a_meaning_and_a_default(cls, name):
    field = options.fields(cls)[name]
    assert len(field.metadata["meaning"]) > 5
    kind, _ = options.type_of(cls, name)
    assert kind in (int, float, bool, str, list)


@pytest.mark.parametrize("cls, name", EVERY_OPTION)
def test_the_command_line_takes_every_default_back(cls, name):
    value = getattr(cls(), name)
    word = ",".join(value) if isinstance(value, list) else str(value)
    assert getattr(read_settings(cls, [f"--{name}={word}"])[0], name) == value


@pytest.mark.parametrize("cls, name", EVERY_OPTION)
def test_a_config_takes_every_default_back(cls, name, tmp_path):
    value = getattr(cls(), name)
    assert read_config(cls, config(tmp_path, f"{name} = {value!r}\n")) == {name: value}


def options_read_by(path):
    """Names read as settings.name, self.settings.name, options.name, s.name, or, of a model's own, config.name in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in ("s", "options", "config") or owner.endswith("settings"):
                yield node.attr


def test_every_option_is_read_somewhere():
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    files = [path for folder in [ROOT, *rooms] for path in folder.glob("*.py") if path.name != "settings.py"]
    read = {name for path in files for name in options_read_by(path)}
    unread = {name for _, name in EVERY_OPTION} - read
    assert not unread, f"options that nothing reads: {', '.join(sorted(unread))}"


def test_the_model_has_every_model_option():
    """They reach it as a whole, by name: its config must know each of them."""
    from model import GPTConfig

    assert set(options.fields(ModelOptions)) <= {field.name for field in dataclasses.fields(GPTConfig)}


def test_no_torch():
    code = "import sys, settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# -----------------------------------------------------------------------------
# Wrong values

ODD_VALUES = [None, True, 3, 2.5, "seven", b"bytes", ["a"], [1], {"a": 1}, {1}, 1j, ("a", "b"), ...]


def fits(kind, optional, value, element=(str,)):
    """May a config give `value` to an option of this type? element: what a list may hold."""
    if value is None:
        return optional
    if kind is list:
        return isinstance(value, list | tuple) and all(type(item) in element for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


@pytest.mark.parametrize("cls, name", EVERY_OPTION)
def test_a_config_value_of_the_wrong_type_is_refused(cls, name, tmp_path):
    refusals = 0
    for value in ODD_VALUES:
        if not fits(*options.type_of(cls, name), value, (int, float) if name == "reward_weights" else (str,)):
            refusals += 1
            path = config(tmp_path, f"{name} = {'...' if value is ... else repr(value)}\n")
            message = refused(read_config, cls, path)
            assert f"{path}:1: {name} " in message
    assert refusals >= 9


numeric = [(cls, name) for cls, name in EVERY_OPTION if options.type_of(cls, name)[0] in (int, float, bool)]


@given(st.sampled_from(numeric), st.text(max_size=12))
def test_words_that_are_no_numbers_are_refused(which, word):
    cls, name = which
    kind, optional = options.type_of(cls, name)
    try:
        float(word)
        return  # a number, or nan
    except ValueError:
        if word.lower() in ("true", "false", "none"):
            return
    assert f"--{name} takes " in refused(read_settings, cls, [f"--{name}={word}"])


@pytest.mark.parametrize("cls, name", [(c, n) for c, n in EVERY_OPTION if options.type_of(c, n)[0] is float])
def test_numbers_must_be_finite(cls, name):
    for word in ("nan", "inf", "-inf", "1e999", "1" + "0" * 400):
        assert f"--{name} must be finite" in refused(read_settings, cls, [f"--{name}={word}"])


@pytest.mark.parametrize(
    "cls, name", [(c, n) for c, n in EVERY_OPTION if options.fields(c)[n].metadata["minimum"] is not None]
)
def test_numbers_under_the_minimum_are_refused(cls, name):
    kind, _ = options.type_of(cls, name)
    minimum = options.fields(cls)[name].metadata["minimum"]
    under = minimum - 1 if kind is int else minimum - 1e-6
    assert f"--{name}={under} is below {minimum}" in refused(read_settings, cls, [f"--{name}={under}"])
    assert settings.parse_value(cls, name, str(minimum)) == minimum


@pytest.mark.parametrize("cls, name", [(c, n) for c, n in EVERY_OPTION if options.fields(c)[n].metadata["choices"]])
def test_other_words_than_the_choices_are_refused(cls, name):
    choices = options.fields(cls)[name].metadata["choices"]
    for choice in choices:
        assert settings.parse_value(cls, name, choice) == choice
    message = refused(read_settings, cls, [f"--{name}={choices[-1]}e"])
    assert f"--{name}='{choices[-1]}e' is not one of {', '.join(choices)}; did you mean {choices[-1]}?" in message
    assert "did you mean" not in refused(read_settings, cls, [f"--{name}=@"])


@pytest.mark.parametrize("cls", CLASSES[:4])
def test_an_unknown_option_is_answered_with_the_nearest(cls, tmp_path):
    for name in options.fields(cls):
        typo = name[:-1] + "_" + name[-1]
        near = re.search(r"did you mean (\w+)\?$", refused(read_settings, cls, [f"--{typo}=1"]))
        assert near and near[1] in options.fields(cls)
    assert refused(
        read_settings, cls, ["--max_new_token=3"] if cls is not SFTSettings else ["--learning_rat=3"]
    ).endswith("did you mean max_new_tokens?" if cls is not SFTSettings else "did you mean learning_rate?")
    assert refused(read_settings, cls, ["--qqq=1"]) == "unknown option --qqq; --help lists them all"
    path = config(tmp_path, "'''why'''\n\nsede = 3\n")
    assert refused(read_config, cls, path) == f"unknown option {path}:3: sede; did you mean seed?"


# -----------------------------------------------------------------------------
# The command line


def test_ways_to_write_a_value():
    def read(cls, *words):
        return read_settings(cls, words)[0]

    assert read(SampleSettings, "--prompt=a=b").prompt == "a=b"
    assert read(SampleSettings, "--prompt=1+2=").prompt == "1+2="
    assert read(SampleSettings, "--prompt", "a b").prompt == "a b"
    assert read(SampleSettings, "--prompt=--help").prompt == "--help"
    assert read(SampleSettings, "--prompt=").prompt == ""
    assert read(SFTSettings, "--seed", "3", "--seed=4").seed == 4  # the last one holds
    assert read(SFTSettings, "--learning_rate=1").learning_rate == 1.0
    assert type(read(SFTSettings, "--learning_rate=1").learning_rate) is float
    assert read(SFTSettings, "--bias=true").bias is read(SFTSettings, "--bias=1").bias is True
    assert read(SFTSettings, "--tie_embeddings=False").tie_embeddings is False
    assert read(GRPOSettings, "--reward_funcs=a:b, c.d:e").reward_funcs == ["a:b", "c.d:e"]
    assert read(GRPOSettings, "--reward_funcs=").reward_funcs == []
    assert read(GRPOSettings, "--epsilon_high=0.28").epsilon_high == 0.28
    assert read(GRPOSettings, "--epsilon_high=none", "--delta=None").epsilon_high is None
    assert GRPOSettings().reward_funcs is not GRPOSettings().reward_funcs  # no list that is shared


def test_wrong_command_lines(tmp_path, monkeypatch):
    assert refused(read_settings, SFTSettings, ["--seed"]) == "--seed has no value; write --seed=value"
    assert refused(read_settings, SFTSettings, ["--seed", "--digits=3"]) == "--seed has no value; write --seed=value"
    assert refused(read_settings, SFTSettings, ["--seed=1.5"]) == "--seed takes a whole number, not '1.5'"
    assert refused(read_settings, SFTSettings, ["--bias=yes"]) == "--bias takes true or false, not 'yes'"
    assert "'none'" in refused(read_settings, GRPOSettings, ["--epsilon=none"])
    assert "one config is taken, 2 were given: a.py b.py" in refused(read_settings, SFTSettings, ["a.py", "b.py"])
    with pytest.raises(SnugError, match="one folder is taken"):
        read_settings(SampleSettings, ["a", "b"], positional="folder")
    monkeypatch.chdir(tmp_path)
    assert refused(read_settings, SFTSettings, ["nope.py"]) == "config nope.py: No such file or directory"
    Path("config").mkdir()
    Path("config/sft_small.py").write_text("seed = 9\n")
    assert refused(read_settings, SFTSettings, ["config/sft_smal.py"]).endswith("did you mean config/sft_small.py?")
    assert "config config: Is a directory" in refused(read_settings, SFTSettings, ["config"])


def test_the_command_line_overrides_the_config(tmp_path):
    path = config(tmp_path, '"""A motive."""\nseed = 5\ndigits = 2\n')
    result, given_names, place = read_settings(SFTSettings, ["--seed=6", path, "--batch_size=4"])
    assert (result.seed, result.digits, result.batch_size) == (6, 2, 4)
    assert given_names == {"seed", "digits", "batch_size"} and place == path


def test_a_folder_is_not_read():
    result, given_names, place = read_settings(SampleSettings, ["out/no_such_run", "--seed=2"], positional="folder")
    assert (result.seed, given_names, place) == (2, {"seed"}, "out/no_such_run")


@pytest.mark.parametrize("cls", CLASSES)
def test_help_shows_every_option_with_its_default(cls, capsys):
    with pytest.raises(SystemExit) as caught:
        read_settings(cls, ["--seed=2", "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name, field in options.fields(cls).items():
        lines = [line for line in shown.splitlines() if line.startswith(f"  --{name}=")]
        unit = field.metadata["unit"]
        assert lines == [f"  --{name}={getattr(cls(), name)}" + (f" {unit}" if unit else "")]
        assert field.metadata["meaning"].split()[-1] in shown
        assert all(choice in shown for choice in field.metadata["choices"])
    assert shown.startswith("usage: ") and cls.__doc__ in shown


def test_settings_are_written_as_json():
    written = json.loads(settings.to_json(GRPOSettings(seed=3)))
    assert written == dataclasses.asdict(GRPOSettings(seed=3)) and GRPOSettings(**written).seed == 3


def test_friendly_errors(capsys):
    with pytest.raises(SystemExit) as caught, settings.friendly_errors():
        raise SnugError("seed=-1 is below 0")
    assert caught.value.code == 2 and capsys.readouterr().err == "error: seed=-1 is below 0\n"
    with pytest.raises(ZeroDivisionError), settings.friendly_errors():
        _ = 1 / 0


# -----------------------------------------------------------------------------
# Configs are data


def test_a_config_is_assignments_of_literals(tmp_path):
    text = """
'''Why these.'''
learning_rate = 1  # a whole number serves
epsilon_high = None
reward_funcs = ('a:b', "c:d")
bias = True
seed = 0x10
delta = 4.0
countdown_operators = '+' '-'
"""
    values = read_config(GRPOSettings, config(tmp_path, text))
    assert values == dict(
        learning_rate=1.0,
        epsilon_high=None,
        reward_funcs=["a:b", "c:d"],
        bias=True,
        seed=16,
        delta=4.0,
        countdown_operators="+-",
    )
    assert type(values["learning_rate"]) is float and type(values["reward_funcs"]) is list
    assert read_config(GRPOSettings, config(tmp_path, "")) == {}


@pytest.mark.parametrize(
    "line",
    [
        "import os; os.mkdir('touched')",
        "open('touched', 'w')",
        "seed = open('touched', 'w')",
        "seed = __import__('os').mkdir('touched')",
        "seed = [open('touched', 'w') for _ in range(1)]",
        "seed = (lambda: open('touched', 'w'))()",
        "for seed in range(3): open('touched', 'w')",
        "while open('touched', 'w'): pass",
        "with open('touched', 'w') as seed: pass",
        "def seed(f=open('touched', 'w')): pass",
        "class seed: x = open('touched', 'w')",
        "if open('touched', 'w'): seed = 1",
        "assert open('touched', 'w')",
        "out_dir = f\"{open('touched', 'w')}\"",
        "seed = digits",
        "seed = 1 + 1",
        "seed = 2 ** 99999999",
        "seed: int = 3",
        "seed += 1",
        "seed = digits = 1",
        "seed, digits = 1, 2",
        "settings.seed = 3",
        "seed['a'] = 3",
        "(seed := 3)",
        "del seed",
        "seed = {[]}",
        "seed =",
        "seed = '",
        "seed = 1\x00",
        "seed = " + "9" * 5000,
        "seed = " + "(" * 500,
        "seed = " + "-" * 5000 + "1",
    ],
)
def test_a_config_is_never_executed(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    path = config(tmp_path, line + "\n")
    assert path in refused(read_config, GRPOSettings, path)
    assert not Path("touched").exists()


def test_a_config_that_is_not_text(tmp_path):
    path = tmp_path / "config.py"
    path.write_bytes(b"seed = '\xff\xfe'\n")
    assert str(path) in refused(read_config, GRPOSettings, str(path))


def test_a_config_number_too_large_for_a_float(tmp_path):
    assert "learning_rate must be finite" in refused(
        read_config, SFTSettings, config(tmp_path, "learning_rate = 1" + "0" * 400)
    )


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.name)
def test_configs_of_the_repository_are_right(path):
    cls = SFTSettings if path.name.startswith("sft") else GRPOSettings
    result, given_names, _ = read_settings(cls, [str(path)])
    assert given_names  # a short diff, but a diff
    assert result != cls()


# -----------------------------------------------------------------------------
# Combinations


@pytest.mark.parametrize(
    "cls, words, message",
    [
        (
            GRPOSettings,
            "--group_size=1",
            "group_size=1: a group needs at least 2 completions to compare; try --group_size=8",
        ),
        (SFTSettings, "--n_head=3", "n_head=3 does not divide n_embd=64"),
        (SFTSettings, "--n_kv_head=3", "n_kv_head=3 does not divide n_head=4"),
        (SFTSettings, "--n_embd=12 --position=rotary", "n_embd=12 / n_head=4 is an odd head width"),
        (
            SFTSettings,
            "--gradient_accumulation_steps=3",
            "gradient_accumulation_steps=3 does not divide batch_size=128",
        ),
        (
            SFTSettings,
            "--gradient_accumulation_steps=2 --max_tokens_per_micro_batch=512",
            "both cut the batch; set one of them",
        ),
        (
            GRPOSettings,
            "--gradient_accumulation_steps=2 --max_tokens_per_micro_batch=512",
            "both cut the batch; set one of them",
        ),
        (
            GRPOSettings,
            "--train_batch_size=100",
            "train_batch_size=100 does not divide the rollout of batch_size * group_size = 64 * 16 = 1024",
        ),
        (GRPOSettings, "--train_batch_size=2048", "train_batch_size=2048 does not divide"),
        (GRPOSettings, "--gradient_accumulation_steps=3", "does not divide the 1024 completions"),
        (GRPOSettings, "--gradient_accumulation_steps=3 --train_batch_size=128", "does not divide the 128 completions"),
        (GRPOSettings, "--delta=1.2", "delta=1.2 must be above 1 + epsilon_high"),
        (GRPOSettings, "--delta=1.25 --epsilon_high=0.28", "delta=1.25 must be above 1 + epsilon_high"),
        (GRPOSettings, "--reward_funcs=is_short", "reward_funcs='is_short': write module:function"),
        (GRPOSettings, "--reward_funcs=a:b,:c", "reward_funcs=':c': write module:function"),
        (SFTSettings, "--demonstration_noise=1.5", "demonstration_noise=1.5 is a probability: 0 to 1"),
        (SFTSettings, "--adam_beta1=1", "adam_beta1=1.0 must be below 1"),
        (GRPOSettings, "--adam_beta2=1.5", "adam_beta2=1.5 must be below 1"),
        (SFTSettings, "--countdown_min_numbers=5", "countdown_min_numbers=5 is above countdown_max_numbers=4"),
        (SFTSettings, "--countdown_operators=+%", "countdown_operators='+%': choose from + - * /"),
        (SFTSettings, "--countdown_operators=", "countdown_operators='': choose from + - * /"),
    ],
)
def test_combinations_that_cannot_be(cls, words, message):
    assert message in refused(read_settings, cls, words.split())


@pytest.mark.parametrize(
    "cls, words",
    [
        (GRPOSettings, "--group_size=2 --train_batch_size=128 --gradient_accumulation_steps=4"),
        (GRPOSettings, "--max_new_tokens=64 --init_from=out/sft"),  # block_size is the checkpoint's
        (GRPOSettings, "--delta=1.3 --epsilon=0.2 --epsilon_high=0.28"),
        (SFTSettings, "--n_kv_head=2 --position=rotary --demonstration_noise=1"),
        (SFTSettings, "--max_tokens_per_micro_batch=512"),
        (SFTSettings, "--countdown_operators=- --countdown_min_numbers=4"),
    ],
)
def test_combinations_that_can(cls, words):
    read_settings(cls, words.split())


@given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=300, deadline=None)
def test_whatever_cannot_be_is_refused_by_name(seed):
    """Values and combinations drawn at random, up to where torch would be imported; tests/refuse.py gives them to the commands."""
    cls, words, name = refuse.draw(random.Random(seed))
    try:
        prepare(*read_settings(cls, words)[:2])
    except SnugError as error:
        assert name in str(error) and "\n" not in str(error), (words, str(error))
    else:
        pytest.fail(f"taken: {words}")


def test_the_commands_refuse_too(capsys):
    assert refuse.main(count=4, seed=1) == []
    assert json.loads(capsys.readouterr().out)["count"] == 4
