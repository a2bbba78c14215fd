"""What SFT learns: of a conversation each turn of the assistant, as TRL; and its loss on held-out demonstrations."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

import train_sft
from batch import Cut
from data import make_task
from helpers.errors import assert_refused, refusal
from helpers.models import CHATML, make_chat_model
from helpers.runs import SMALL
from helpers.tasks import written
from model import make_model
from runs.evaluation import prepare_evaluation
from runs.loading import load_run, load_weights
from runs.log import read_log
from runs.page.charts import charts_of
from runs.page.runs import read_runs
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, SFTSettings

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
)
MARKED += "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n"
MARKED += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def conversation(i, *roles):
    return [dict(role=role, content=f"{role[0]}{i}.{n}") for n, role in enumerate(roles)]


TURNS = conversation(1, "system", "user", "assistant", "tool", "assistant", "user", "assistant")


def training_of(tmp_path, rows, template=CHATML, **options):
    """-> what train_sft's functions take, of a model in float32."""
    folder, path = make_chat_model(tmp_path / "qwen", template), written(tmp_path, rows)
    options = dict(chat=True, device="cpu", eval_prompts=0) | options
    options |= dict(task="jsonl", data_file=path, init_from=str(folder), out_dir=str(tmp_path / "run"))
    prepared = prepare(SFTSettings(**options))
    model = make_model(prepared.shape, torch.device("cpu"), initialise=False)
    load_weights(prepared.origin, model)
    settings = dataclasses.replace(prepared.settings, dtype="float32")
    return SimpleNamespace(prepared=prepared, settings=settings, model=model)


@pytest.mark.parametrize("which, turns", [("all", 3), ("last", 1)])
def test_the_gradient_of_a_conversation_is_that_of_trl(tmp_path, which, turns):
    """Of one with three turns of the assistant, a tool's message between."""
    transformers = pytest.importorskip("transformers")
    trl = pytest.importorskip("trl.trainer.sft_trainer", reason="pip install -r requirements-long.txt")
    training = training_of(tmp_path, [dict(messages=TURNS)], MARKED, batch_size=turns, assistant_turns=which)
    batch = train_sft.demonstrations(0, training)
    loss = train_sft.accumulate_gradient(training.model, batch, Cut(batch), training.settings)["loss"]
    folder = training.prepared.origin.path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    made = tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = made["input_ids"], made["assistant_masks"]
    if which == "last":
        begin = len(mask) - mask[::-1].index(0, mask[::-1].index(1))
        mask = [0] * begin + mask[begin:]
    example = dict(input_ids=ids, labels=[i if learned else -100 for i, learned in zip(ids, mask, strict=True)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    labels = (inputs := trl.DataCollatorForLanguageModeling(pad_token_id=0)([example])).pop("labels")
    logits = theirs(**inputs).logits[:, :-1, : training.model.config.n_vocab]  # the other rows are padding
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    for ours, name in ((training.model.embedding, "embed_tokens"), (training.model.norm, "norm")):
        grad = theirs.get_submodule(f"model.{name}").weight.grad
        torch.testing.assert_close(ours.weight.grad, grad, rtol=0, atol=1e-5)
    assert theirs.model.norm.weight.grad.abs().max() > 1e-3


def test_what_a_row_demonstrates(tmp_path):
    """Conversations, rows of TRL's, prompts that begin an answer. A turn's prompt is what the template writes then:
    here earlier turns lose their thoughts."""
    user, begun = dict(role="user", content="?"), dict(role="assistant", content="<think>")
    silent = [begun, user, dict(begun, content=""), user]  # it opens the conversation, and then says nothing
    rows = [
        (dict(messages=TURNS), [(TURNS[:2], "a1.2"), (TURNS[:4], "a1.4"), (TURNS[:6], "a1.6")]),
        (dict(messages=silent, demonstration="x"), [(silent, "x")]),
        (dict(prompt=[user], completion=[dict(begun, content="full")], answer="5"), [([user], "full")]),
        (dict(prompt=TURNS[:4], completion="y"), [(TURNS[:4], "y")]),
        (dict(prompt=[user, begun], completion="z"), [([user, begun], "z")]),
        (dict(prompt=[user, begun], answer=4), [([user, begun], "4")]),
        (dict(prompt=[user, begun]), [([user], "<think>")]),
        (dict(prompt=[user], completion="no", demonstration="yes"), [([user], "yes")]),
    ]
    template = CHATML.replace("message.content", "(message.content if loop.last else message.content | upper)")
    for n, (row, expected) in enumerate(rows):
        training = training_of(tmp_path / str(n), [row], template, batch_size=len(expected))
        task, tokenizer = training.prepared.task, training.prepared.tokenizer
        found = [(row["prompt"], row.get("demonstration") or str(row["answer"])) for row in task.rows["train"]]
        assert sorted(found, key=str) == sorted(expected, key=str)
        batch = train_sft.demonstrations(0, training)
        for row, ids, start, length in zip(
            task.prompts("train", range(len(expected))), batch.tokens.tolist(), batch.prompt_lengths.tolist(),
            batch.completion_lengths.tolist(), strict=True,
        ):  # fmt: skip
            text = task.demonstration(row, None)
            assert ids[:start] == tokenizer.encode_prompt(row["prompt"])
            assert ids[start : start + length] == [*tokenizer.encode(text), tokenizer.stop_token]
    with refusal("data.jsonl:1: two messages of the assistant follow each other; join them"):
        training_of(tmp_path / "two", [dict(messages=[user, begun, begun])])


def test_a_conversation_is_on_one_side(tmp_path):
    """All its turns; also where an environment makes several problems of one prompt."""
    rows = [dict(messages=conversation(i // 2, *["user", "assistant"] * 3), n=i) for i in range(60)]
    options = dict(task="jsonl", data_file=written(tmp_path, rows), chat=True, eval_prompts=5)
    rows += [dict(messages=row["messages"][:2], n=100 + row["n"]) for row in rows]  # they begin longer ones
    options["data_file"] = written(tmp_path, rows)
    for environment, key in ("", lambda row: row["n"] // 2), ("a:B", lambda row: row["n"]):
        settings = SFTSettings(**options, environment=environment), GRPOSettings(**options, environment=environment)
        sft, grpo = (make_task(each, demonstrations=isinstance(each, SFTSettings)) for each in settings)
        sides = [{key(row) for row in sft.rows[split]} for split in ("train", "test")]
        assert len(sft.rows["train"]) > len(grpo.rows["train"]) and not sides[0] & sides[1]
        prompts = [{json.dumps(row["prompt"]) for row in sft.rows[split]} for split in ("train", "test")]
        assert environment or not prompts[0] & prompts[1]
        assert sides == [{key(row) for row in grpo.rows[split]} for split in ("train", "test")]


def test_a_run_that_learned_what_would_be_held_out_is_refused(tmp_path):
    """As the start of another run, and in an evaluation. With a test_file, or where nothing is held out, it is not."""
    rows = [dict(prompt=f"{i}=", answer=str(i)) for i in range(40)]
    file, other = written(tmp_path, rows[:30]), written(tmp_path, rows[30:], "test.jsonl")
    options = dict(task="jsonl", data_file=file, n_layer=1, n_embd=16, block_size=16, max_iters=1, device="cpu")
    run = SFTSettings(**options, eval_prompts=0, out_dir=str(tmp_path / "run"))
    train_sft.main(prepare(run))
    onward = GRPOSettings(**options, init_from=run.out_dir, max_new_tokens=4, out_dir=str(tmp_path / "on"), beta=0.0)
    said = "run has learned rows of data_file=.* that would be held out now; give --test_file"
    assert_refused(said, prepare, onward)
    with refusal(said):  # the same file by another name
        prepare(dataclasses.replace(onward, data_file=f"{tmp_path}/../{tmp_path.name}/data.jsonl"))
    assert_refused(said, prepare_evaluation, EvaluateSettings(), set(), run.out_dir)
    for allowed in dict(eval_prompts=0), dict(test_file=other):
        prepare(dataclasses.replace(onward, **allowed))
    held_out = dataclasses.replace(run, eval_prompts=5, out_dir=str(tmp_path / "run2"))
    train_sft.main(prepare(held_out))
    onward = dataclasses.replace(onward, init_from=held_out.out_dir)
    prepare(onward)
    assert_refused("run2 has learned rows", prepare, dataclasses.replace(onward, environment="test_sft:Empty"))


class Empty:
    """An environment."""


@pytest.mark.parametrize("pieces", [0, 40])
def test_the_held_out_loss_is_that_of_a_loop(tmp_path, capsys, pieces):
    """Before, at eval_interval, at the end; also of rows that nothing scores, and more of them than a step has."""
    options = {name: value for name, value in SMALL.items() if name not in ("group_size", "max_new_tokens")}
    rows = [dict(prompt=f"{i}=", demonstration="x" * (1 + i % 5)) for i in range(65)]
    options |= dict(task="jsonl", data_file=written(tmp_path, rows), block_size=16, max_tokens_per_micro_batch=pieces)
    options |= dict(out_dir=str(tmp_path / "run"), max_iters=3, eval_interval=2, eval_prompts=500)
    train_sft.main(prepared := prepare(SFTSettings(**options)))
    log, said = read_log(tmp_path / "run"), capsys.readouterr().out
    losses = [log[0]["before/eval_loss"], log[1]["eval_loss"], log[2]["eval_loss"]]
    assert losses[0] > losses[1] > losses[2] and "eval_loss" not in log[0] and "pass_at_1" not in log[1]
    assert f"before training (held out {losses[0]:.4f})\n" in said and f" (held out {losses[1]:.4f})" in said
    [chart] = [chart for chart in charts_of(read_runs([tmp_path / "run"])) if chart.title == "Loss"]
    assert [line.name for line in chart.series] == ["training", "held out"] and chart.series[1].y == losses
    model, tokenizer, *_ = load_run(tmp_path / "run", "cpu")
    total, count = 0.0, 0
    held_out = prepared.task.rows["test"]
    for row in held_out:
        prompt = tokenizer.encode(row["prompt"])
        answer = [*tokenizer.encode(row["demonstration"]), tokenizer.stop_token]
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([prompt + answer])))[0].double().log_softmax(-1)
        total -= sum(logits[len(prompt) + i - 1, token].item() for i, token in enumerate(answer))
        count += len(answer)
    assert losses[2] == pytest.approx(total / count, abs=1e-5)
    assert len(held_out) > options["batch_size"] and len(held_out) % options["batch_size"]  # the last step is smaller
