"""What is allowed and seldom meant is said at the start, of a run, an evaluation and sample.py; what is usual is not."""

import json

import pytest

import evaluate
import grpo
import sample
from helpers.models import make_chat_model
from helpers.tokenizers import HERMES
from runs.checkpoint import find_run
from runs.evaluation import prepare_evaluation
from runs.loading import load_run
from runs.notes import notes
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, SampleSettings
from snug.options import make_settings

USER = dict(role="user", content="2+3=")
ASSISTANT = dict(role="assistant", content="It is")
RENDERED = "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\n<think>"
TEMPLATE, TOOLS, SPELLED, READ, BEGUN, LEFT_OUT, RATE = (
    "the prompts are plain text, without the model's chat template; --chat adds it",
    "the chat template does not tell the model of its tools; show a call in the prompt",
    "1 of 10 prompts spell special tokens, such as <|im_end|>: in 0 they become special tokens, as in transformers; "
    "elsewhere, as in messages, they stay text",
    "10 of 10 prompts spell special tokens, such as <|im_start|>: in 10 they become special tokens, as in transformers",
    "10 of 10 prompts end with a message of the assistant: completions continue it",
    "10 of 10 prompts end with a message of the assistant: it is left out",
    "learning_rate=1e-06, the default for pretrained weights",
)
LARGE = "learning_rate=0.001; the default for pretrained weights is 1e-06"


class Game:
    def reset(self, **columns):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_chat_model(tmp_path_factory.mktemp("notes") / "qwen"))


def options_of(folder, model, prompt="2+3=", first="2+3=", column="prompt", **changes):
    """prompt: of nine rows, first: of one."""
    rows = [{column: first if i == 0 else prompt, "answer": i} for i in range(10)]
    for i, row in enumerate(rows):  # ten prompts
        if isinstance(row[column], str):
            row[column] += str(i)
        else:
            row[column] = [dict(turn, content=f"{turn['content']}{i}") for turn in row[column]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = dict(task="jsonl", data_file=str(folder / "rows.jsonl"), init_from=model, out_dir=str(folder / "run"))
    options |= dict(device="cpu", beta=0.0, learning_rate=1e-5, max_new_tokens=4, eval_prompts=1)
    return options | changes


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(chat=True), []),
        (dict(), [TEMPLATE]),
        (dict(init_from=""), []),  # no template
        (dict(chat=True, prompt=[USER, ASSISTANT], first=[USER, ASSISTANT]), [BEGUN]),
        (dict(chat=True, prompt=[USER, ASSISTANT], first=[USER, ASSISTANT], column="messages"), [LEFT_OUT]),
        (dict(prompt=RENDERED, first=RENDERED), [READ]),
        (dict(chat=True, learning_rate=1e-3), [RATE]),
        (dict(chat=True, learning_rate=1e-3, lora_rank=2), [RATE.replace("06", "05")]),
        (dict(init_from="", learning_rate=1e-3), []),
        (dict(chat=True, first="end with <|im_end|>"), [SPELLED]),
        (dict(first="end with <|im_end|>"), [TEMPLATE, SPELLED.replace("in 0", "in 1")]),
        (dict(chat=True, prompt=[USER], first=[USER | dict(content="a <|im_end|>")]), [SPELLED]),
        (dict(chat=True, prompt=[USER], first=[dict(role="system", content="<|im_end|>"), USER]), [SPELLED]),
        (dict(chat=True, tools=["examples.tools:calc"]), [TOOLS]),
        (dict(chat=True, environment="games:Game"), []),  # it has no tools
        (dict(tools=["examples.tools:calc"]), [TEMPLATE, TOOLS]),
    ],
)
def test_a_run_says_what_is_seldom_meant(tmp_path, model, changes, said):
    settings = GRPOSettings(**options_of(tmp_path, model, **changes))
    lines = notes(prepare(settings, functions={"games:Game": Game}))
    assert len(lines) == len(said) and all(map(str.startswith, lines, said)), lines


def test_a_template_that_describes_tools_needs_no_word(tmp_path):
    model = str(make_chat_model(tmp_path / "hermes", HERMES))
    assert notes(prepare(GRPOSettings(**options_of(tmp_path, model, chat=True, tools=["examples.tools:calc"])))) == []
    assert notes(prepare(GRPOSettings(**options_of(tmp_path, model, tools=["examples.tools:calc"])))) == [
        TEMPLATE,
        TOOLS,
    ]


def test_the_run_the_evaluation_and_the_sample_say_it(tmp_path, model, capsys):
    """A run of random weights, all cut off."""
    options = options_of(tmp_path, model, max_iters=1, batch_size=2, group_size=2)
    run = grpo.train(**options)
    said = capsys.readouterr().out
    assert f"note: {TEMPLATE}" in said
    assert not grpo.train(**options | dict(out_dir=str(tmp_path / "probe"), probe=True)).finished
    assert f"  note: {TEMPLATE}\n" in capsys.readouterr().out
    onward = options | dict(init_from=run.folder, out_dir=str(tmp_path / "on"), learning_rate=1e-3)
    again = prepare(GRPOSettings(**onward))  # a run of such a model
    assert notes(again) == [TEMPLATE, RATE] and again.settings.learning_rate == 1e-6
    again = prepare(*make_settings(GRPOSettings, "", onward))  # here the user gave it
    assert notes(again) == [TEMPLATE, LARGE] and again.settings.learning_rate == 1e-3
    grpo.train(**options | dict(chat=True, out_dir=str(tmp_path / "chat")))
    said = capsys.readouterr().out
    assert "raise max_new_tokens" in said and "--chat" not in said
    given = dict(task="jsonl", data_file=str(tmp_path / "rows.jsonl"), samples_file="none", device="cpu")
    settings, names = make_settings(EvaluateSettings, "", given | dict(num_prompts=2, max_new_tokens=5))
    evaluate.main(settings, *prepare_evaluation(settings, names, model))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("note")] == [f"note: {TEMPLATE}"]
    settings, names = make_settings(SampleSettings, "", dict(prompt="2+3=", max_new_tokens=2, device="cpu"))
    sample.complete(settings, names, load_run(find_run(model), "cpu"))
    assert capsys.readouterr().err == f"note: {TEMPLATE}\n"
    settings, names = make_settings(SampleSettings, "", dict(prompt="2+3=", chat=True, max_new_tokens=2, device="cpu"))
    sample.complete(settings, names, load_run(find_run(model), "cpu"))
    assert capsys.readouterr().err == ""
