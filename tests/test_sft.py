"""What SFT learns from: the assistant's turns, as TRL's assistant_only_loss; and its loss on held-out demonstrations."""

import dataclasses
import time
from types import SimpleNamespace

import pytest
import torch

import train_sft
from batch import Cut
from helpers.errors import refusal
from helpers.models import CHATML, make_chat_model
from helpers.runs import SMALL
from helpers.tasks import written
from model import make_model
from runs.loading import load_run, load_weights
from runs.log import read_log
from runs.page.charts import charts_of
from runs.page.runs import read_runs
from runs.prepare import prepare
from settings import SFTSettings

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = "system", "user", "assistant", "tool", "assistant", "user", "assistant"


def conversation(i, *roles):
    return [dict(role=role, content=f"{role[0]}{i}.{n}") for n, role in enumerate(roles)]


ROWS = [dict(messages=conversation(i, *ROLES[: 3 if i % 4 == 0 else 7])) for i in range(12)]


def training_of(tmp_path, rows=ROWS, template=MARKED, **options):
    """-> what train_sft's functions take, of a model in float32."""
    folder, path = make_chat_model(tmp_path / f"qwen{time.time()}", template), written(tmp_path, rows)
    options = dict(chat=True, batch_size=4, device="cpu", eval_prompts=0) | options
    options |= dict(task="jsonl", data_file=path, init_from=str(folder), out_dir=str(tmp_path / "run"))
    prepared = prepare(SFTSettings(**options))
    model = make_model(prepared.shape, torch.device("cpu"), initialise=False)
    load_weights(prepared.origin, model)
    return SimpleNamespace(
        prepared=prepared, settings=dataclasses.replace(prepared.settings, dtype="float32"), model=model
    )


@pytest.mark.parametrize("which", ["all", "last"])
def test_the_gradient_is_that_of_trl(tmp_path, which):
    """Of conversations with one turn and with three, tools between."""
    transformers = pytest.importorskip("transformers")
    trl = pytest.importorskip("trl.trainer.sft_trainer", reason="pip install -r requirements-long.txt")
    training = training_of(tmp_path, assistant_turns=which)
    batch = train_sft.demonstrations(0, training)
    sft_loss = train_sft.accumulate_gradient(training.model, batch, Cut(batch), training.settings)["loss"]
    folder = training.prepared.origin.path
    tokenizer, examples = transformers.AutoTokenizer.from_pretrained(folder), []
    order = [row["prompt"] for row in training.prepared.task.prompts("train", range(4))]
    for prompt in order:
        [messages] = [row["messages"] for row in ROWS if row["messages"][:-1] == prompt]
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        mask = made["assistant_masks"]
        if which == "last":
            last = len(mask) - mask[::-1].index(1)
            mask = [m and 0 not in mask[i:last] for i, m in enumerate(mask)]
        labels = [i if learned else -100 for i, learned in zip(made["input_ids"], mask, strict=True)]
        examples.append(dict(input_ids=made["input_ids"], labels=labels))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    labels = (inputs := trl.DataCollatorForLanguageModeling(pad_token_id=0)(examples)).pop("labels")
    logits = theirs(**inputs).logits[:, :-1, : training.model.config.n_vocab]  # the other rows are padding
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    assert len({len(each) for each in order}) == 2 and sft_loss == pytest.approx(loss.item(), abs=1e-5)
    for ours, name in ((training.model.embedding, "embed_tokens"), (training.model.norm, "norm")):
        grad = theirs.get_submodule(f"model.{name}").weight.grad
        torch.testing.assert_close(ours.weight.grad, grad, rtol=0, atol=1e-5)
    assert theirs.model.norm.weight.grad.abs().max() > 1e-3


def test_a_turn_that_a_template_writes_in_another_way_is_named(tmp_path):
    """Here all but the last message are in capitals, as other templates leave out earlier thoughts."""
    template = CHATML.replace("message.content", "(message.content if loop.last else message.content | upper)")
    said = "data.jsonl:2 .the chat template writes message 3 in another way; add --assistant_turns=last"
    with refusal(said):
        training_of(tmp_path, template=template)
    training_of(tmp_path, template=template, assistant_turns="last")
    training_of(tmp_path, ROWS[::4], template)  # one turn


def test_with_one_turn_nothing_else_is_learned(tmp_path):
    """Of messages, and of TRL's rows of text and of messages; a demonstration that is named goes first."""
    rows = [dict(prompt=conversation(i, "user"), completion=conversation(i, "x", "assistant")[1:]) for i in range(4)]
    rows += [dict(prompt=f"{i}?", completion=f"a{i}") for i in range(4)]
    rows += [dict(prompt="5?", completion="no", demonstration="5"), dict(prompt="6?", messages=1, completion="6")]
    texts = [f"a{i}.1" for i in range(4)] + [f"a{i}" for i in range(4)] + ["5", "6"]
    for which in ("all", "last"):
        training = training_of(tmp_path, rows, batch_size=10, assistant_turns=which)
        task, tokenizer = training.prepared.task, training.prepared.tokenizer
        batch, order = train_sft.demonstrations(0, training), task.prompts("train", range(10))
        right = [
            texts[next(n for n, r in enumerate(rows) if task.as_prompt(r["prompt"]) == o["prompt"])] for o in order
        ]
        starts, lengths = batch.prompt_lengths.tolist(), batch.completion_lengths.tolist()
        for n, text in enumerate(right):
            ids = batch.tokens[n].tolist()
            assert ids[: starts[n]] == tokenizer.encode_prompt(order[n]["prompt"])
            assert ids[starts[n] : starts[n] + lengths[n]] == [*tokenizer.encode(text), tokenizer.stop_token]
            assert batch.mask[n].tolist() == [i < lengths[n] for i in range(batch.mask.shape[1])]


@pytest.mark.parametrize("pieces", [0, 40])
def test_the_held_out_loss_is_that_of_a_loop(tmp_path, capsys, pieces):
    """Before, at eval_interval, at the end; also of rows that nothing scores, and more of them than a step has."""
    options = {name: value for name, value in SMALL.items() if name not in ("group_size", "max_new_tokens")}
    rows = [dict(prompt=f"{i}=", demonstration="x" * (1 + i % 5)) for i in range(60)]
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
    for row in prepared.task.rows["test"]:
        prompt, answer = (
            tokenizer.encode(row["prompt"]),
            [*tokenizer.encode(row["demonstration"]), tokenizer.stop_token],
        )
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([prompt + answer])))[0].double().log_softmax(-1)
        total -= sum(logits[len(prompt) + i - 1, token].item() for i, token in enumerate(answer))
        count += len(answer)
    assert (
        losses[2] == pytest.approx(total / count, abs=1e-5) and len(prepared.task.rows["test"]) > options["batch_size"]
    )
