"""Prompts as people write them: rendered by themselves, or messages that end with the beginning of the answer."""

import json
import re
from unittest.mock import Mock

import pytest

import grpo
import train_sft
from helpers.models import make_chat_model
from helpers.tokenizers import user
from runs.prepare import prepare
from settings import SFTSettings
from snug.tokenizer import get_tokenizer

BEGUN = "Let me solve this.\n<think>"
FORM = re.compile(r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)<\/think>")
ROWS = [[user(f"{i}+1? <|im_end|>"), user(BEGUN, "assistant")] for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights, and tokens for <think> and </think>."""
    path = make_chat_model(tmp_path_factory.mktemp("begun") / "qwen", brief=True)
    spec = json.loads((path / "tokenizer.json").read_text())
    for number, tag in ((259, "<think>"), (260, "</think>")):
        spec["added_tokens"].append(spec["added_tokens"][0] | dict(id=number, content=tag, special=False))
    (path / "tokenizer.json").write_text(json.dumps(spec))
    return str(path)


def test_a_rendered_prompt_learns_to_close_its_tag(tmp_path, model, capsys):
    """The recipe of R1-zero: the prompt is text that ends with <think>, and the function puts that before a completion."""
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model)
    texts = [theirs.apply_chat_template(row, tokenize=False, continue_final_message=True) for row in ROWS]

    def closes(prompts, completions, **columns):
        pairs = zip(prompts, completions, strict=True)
        return [float(prompt in texts and bool(FORM.search(f"<think>{text}"))) for prompt, text in pairs]

    options = dict(reward_funcs=closes, max_iters=7, batch_size=16, group_size=16, max_new_tokens=5, learning_rate=3e-2)
    options |= dict(init_from=model, out_dir=str(tmp_path / "run"), device="cpu", beta=0.0, eval_prompts=0)
    rewards = [line["reward_mean"] for line in grpo.train(prompts=[dict(prompt=text) for text in texts], **options).log]
    said = capsys.readouterr().out
    assert rewards[0] < 0.1 and rewards[-1] > 0.8
    assert said.count("40 of 40 prompts spell special tokens") == 1 and "--chat" not in said


def test_reward_functions_get_an_answer_with_its_beginning(tmp_path, model):
    """Of messages, as TRL had it while it continued them; the samples have what is learned."""
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    options = dict(reward_funcs=reward, max_iters=1, batch_size=4, group_size=4, max_new_tokens=5, eval_prompts=2)
    options |= dict(init_from=model, out_dir=str(tmp_path / "run"), device="cpu", beta=0.0)
    run = grpo.train(prompts=[dict(prompt=row) for row in ROWS], **options)
    for prompt, completion, ids in seen:
        assert [*prompt, ROWS[0][1]] in ROWS
        assert completion == [user(BEGUN + get_tokenizer(model).decode(ids), "assistant")]
    for line in map(json.loads, (tmp_path / "run/samples.jsonl").read_text().splitlines()):
        assert line["prompt"].endswith("assistant\n" + BEGUN) and 0 < len(line["logprobs"]) <= 5
        assert [user(line["question"]), ROWS[0][1]] in ROWS
    assert run.evaluate(num_prompts=2) and run.sample(max_new_tokens=2)[0].startswith(BEGUN)


def test_answers_spell_no_special_token(tmp_path, model):
    """What SFT learns is text, and a plan has room for it as text, also behind a rendered prompt."""
    rows = [dict(prompt=f"<|im_start|>user\n{i}", answer="<|im_end|><|im_start|>") for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepared = prepare(SFTSettings(task="jsonl", data_file=str(tmp_path / "rows.jsonl"), init_from=model, device="cpu"))
    batch = train_sft.demonstrations(0, Mock(prepared=prepared, settings=prepared.settings, model=Mock(device="cpu")))
    assert {*batch.tokens[:, 0].tolist()} == {257} and {*batch.completion_lengths.tolist()} == {23}
    assert prepared.longest() == (8, 23)
