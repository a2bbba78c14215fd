"""A file of prompts: what is wrong with it is said with file and line, and what is right comes out as it went in."""

import dataclasses
import gzip
import json
import re
import sys
import zlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sample
import train_sft
from data import load_reward_function, make_task
from data.jsonl import Jsonl, text_of
from data.rewards import repeat_columns, total_rewards
from data.task import split_of
from evaluate import prepare_evaluation
from grpo import main
from helpers.errors import assert_refused, refusal
from helpers.runs import tiny
from helpers.tasks import written
from runs.prepare import prepare
from settings import EvaluateSettings, GRPOSettings, SampleSettings, SFTSettings
from snug.options import SnugError, make_settings, merge_options
from snug.tokenizer import get_tokenizer


def task_of(path, cls=SFTSettings, **options):
    return make_task(cls(task="jsonl", data_file=path, **options), cls is SFTSettings)


GOOD = [{"prompt": f"{i}=", "answer": i} for i in range(50)]
BAD = [
    (b'{"prompt": "a"', r"not JSON \(JSONDecodeError: Expecting"),
    (b"[" * 100_000, r"not JSON \("),
    (b'{"prompt": "a", "answer": NaN}', "answer nan is no number of at most 200 digits; write it as text"),
    (b"[1]", "not an object but .1."),
    (b'{"answer": 1, "question": "a"}', "has no column prompt; it has answer, question; name it with --prompt_column="),
    (b'{"prompt": [], "answer": 1}', r"prompt must be text or messages, not \[\]"),
    (b'{"prompt": ["a"], "answer": 1}', """a message must be {"role": text, "content": text}, not 'a'"""),
    (b'{"prompt": [{"role": "user"}], "answer": 1}', "a message must be .* not {'role': 'user'}"),
    (b'{"prompt": [{"role": "user", "content": ["a"]}], "answer": 1}', "a message must be .*'content': .'a'.}"),
    (b'{"messages": [{"role": "assistant", "content": "a"}], "answer": 1}', r"prompt must be text or .* not \[\]"),
    (b'{"prompt": "a", "answer": [1]}', r"answer must be text, a number or a boolean, not \[1\]"),
    (
        b'{"prompt": "a"}',
        "answer must be text, a number or a boolean, not None; rows need an answer, or --answer_column=NAME",
    ),
    (b'{"prompt": "\\ud800", "answer": 1}', "not JSON .*surrogates not allowed"),
]


def test_a_bad_row_is_named_with_file_and_line(tmp_path):
    for number, (line, message) in enumerate(BAD):
        place = (1, 20, 50)[number % 3]
        path = written(tmp_path, [*GOOD[:place], line, *GOOD[place:]])
        assert_refused(f"{path}:{place + 1}: {message}", task_of, path)


def rows_of(path, **options):
    """In the file's order."""
    rows = sum(task_of(str(path), **options).rows.values(), [])
    return sorted(rows, key=lambda row: int(re.search("[0-9]+$", row.place)[0]))


@pytest.mark.parametrize("kind", ["lines", "mark", "CRLF", "list", "indented", "gz"])
def test_files_that_people_have_have_the_same_rows(tmp_path, kind):
    """A list in .jsonl; lines of Windows, and its mark."""
    rows = [dict(prompt=f"a, b; é {i}", answer=i) for i in range(10)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    contents = dict(CRLF="\r\n".join([*lines, "", ""]), list=f"[{','.join(lines)}]\n")
    contents["indented"] = json.dumps(rows, indent=2, ensure_ascii=False)
    content = contents.get(kind, "\n".join(lines))
    content = content.encode("utf-8-sig" if kind == "mark" else "utf-8")
    name = "a.jsonl.gz" if kind == "gz" else "a.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(content) if kind == "gz" else content)
    assert rows_of(tmp_path / name) == rows


def conversation(n, *more):
    """A prompt of messages, the last one the user's; `more`: what comes before it."""
    return [{"role": role, "content": content} for role, content in (*more, ("user", f"{n}="))]


def conversations(n, answer):
    return [[*conversation(i, ("system", "Add.")), dict(role="assistant", content=answer)] for i in range(n)]


def test_a_conversation_is_a_prompt_and_its_last_message_the_demonstration(tmp_path):
    """For SFT whatever the column's name is, for GRPO of `messages`: it goes on behind a prompt. The splits are the same."""
    for column, options in (("messages", {}), ("prompt", {}), ("chat", dict(prompt_column="chat"))):
        rows = [{column: messages, "level": 2} for messages in conversations(30, "x")]
        path, splits = written(tmp_path, rows), []
        for cls, more in ((SFTSettings, {}), (GRPOSettings, dict(reward_funcs=["a:b"]))):
            task = task_of(path, cls, **options, **more)
            splits.append([row["prompt"][1] for row in task.rows["test"]])
            found = sorted(sum(task.rows.values(), []), key=lambda row: int(row["prompt"][1]["content"][:-1]))
            asked = [row | dict(prompt=row[column][:-1], demonstration="x") for row in rows]
            goes_on = cls is GRPOSettings and column != "messages"
            assert found == ([row | dict(prompt=row[column]) for row in rows] if goes_on else asked)
        assert splits[0] == splits[1] != []
    begun = [dict(prompt=messages, demonstration="y") for messages in conversations(30, "x")]
    found = sum(task_of(written(tmp_path, begun), SFTSettings).rows.values(), [])
    assert all(row["prompt"][-1]["content"] == "x" and row["demonstration"] == "y" for row in found)
    rows = [dict(messages=messages[:-1], prompt=f"p{i}", answer=1) for i, messages in enumerate(conversations(30, "x"))]
    assert all(row["prompt"][0] == "p" and row["messages"] for row in rows_of(written(tmp_path, rows)))
    for empty in (None, ""):
        blank = [dict(messages=messages, demonstration=empty) for messages in conversations(30, "x")]
        assert {row["demonstration"] for row in rows_of(written(tmp_path, blank))} == {"x"}
    asked = rows_of(written(tmp_path, [dict(messages=row["messages"], answer=1) for row in rows]))
    assert all(row.keys() == {"prompt", "answer", "messages"} and row["prompt"][-1]["role"] == "user" for row in asked)


@pytest.mark.parametrize("parts", [False, True])
def test_messages_may_have_null_keys_and_a_part_of_text(tmp_path, parts):
    """Arrow gives all messages of a column the same keys. Pictures and calls of tools are refused by line."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [dict(messages=messages) for messages in conversations(20, "x")]
    for message in sum((row["messages"] for row in rows), [dict(rows[0]["messages"][0])]):
        message["name"] = None
        if parts:
            message["content"] = [dict(type="text", text=message["content"], image=None)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = sum(task_of(str(tmp_path / "a.parquet")).rows.values(), [])
    assert sorted(row["prompt"][1]["content"] for row in found) == sorted(f"{i}=" for i in range(20))
    assert all(row["prompt"][0] == dict(role="system", content="Add.") for row in found)
    for role in ("human", "gpt", "model", "User", ""):
        with refusal(f"data.jsonl:2: '{role}' is no role of a message; write system, developer, user"):
            bad = [dict(role="user", content="x"), dict(role=role, content="x")]
            task_of(written(tmp_path, [dict(prompt="x", answer=1), dict(prompt=bad, answer=1)]))
    known = [dict(role=role, content="x") for role in ("system", "developer", "user", "assistant", "tool")]
    rows = [dict(prompt=[*known, dict(role="user", content=f"{i}")], answer=1) for i in range(30)]
    assert all(row["prompt"][:5] == known for row in rows_of(written(tmp_path, rows)))
    for bad in (dict(content=[dict(type="image")]), dict(tool_calls=[1]), dict(content=None)):
        with pytest.raises(SnugError, match="data.jsonl:1: a message must be"):
            task_of(written(tmp_path, [dict(prompt=[dict(role="user", content="x") | bad], answer=1)]))


ANSWERS = [[1, [2]], {"a": {"b": None}}, True, None, "text", 5, float("inf")]


def test_with_reward_functions_an_answer_may_be_anything(tmp_path):
    """The task itself scores only if it can score by all answers."""
    rows = [dict(prompt=f"{i}=", answer=ANSWERS[i % len(ANSWERS)]) for i in range(30)]
    path, free = written(tmp_path, rows), dict(reward_funcs=["a:b"])
    answers = [row["answer"] for row in rows]
    for options in (free, dict(environment="a:b")):
        assert [row["answer"] for row in rows_of(path, cls=GRPOSettings, **options)] == answers
    assert not task_of(path, GRPOSettings, **free).scored
    assert task_of(written(tmp_path, GOOD, "good.jsonl"), GRPOSettings, **free).scored
    assert_refused("answer must be text, a number or a boolean, not", task_of, path, GRPOSettings)


def test_a_row_without_a_column_of_others_has_none_there(tmp_path):
    rows = [dict(prompt=f"{i}=", answer=i) | (dict(level=i) if i % 3 else {}) for i in range(30)]
    task = task_of(written(tmp_path, rows))
    for split in ("train", "test"):
        for row in task.prompts(split, range(task.size(split))):
            assert row["level"] == (row["answer"] if row["answer"] % 3 else None)
    test_file = written(tmp_path, [dict(prompt="x", hard=True)], "test.jsonl")
    task = task_of(written(tmp_path, rows), GRPOSettings, test_file=test_file, reward_funcs=["a:b"])
    assert task.prompts("test", [0]) == [dict(prompt="x", answer=None, level=None, hard=True)]
    assert task.prompts("train", [0])[0]["hard"] is None
    rows = [row | dict(solution=1) if i else row for i, row in enumerate(rows)]
    options = dict(answer_column="solution", reward_funcs=["a:b"])
    task_of(written(tmp_path, rows), GRPOSettings, **options)
    with pytest.raises(SnugError, match="data.jsonl:1: has no column solution; it has prompt, answer"):
        task_of(written(tmp_path, rows), GRPOSettings, answer_column="solution")


@pytest.mark.parametrize("n, least", [(4, 0), (5, 1), (64, 12), (100, 20), (150, 20), (1000, 20)])
def test_of_a_small_file_a_fifth_or_twenty_rows_are_held_out(tmp_path, n, least):
    """First the tenth that the hash names, then the next by hash. Where that tenth is enough, it is all."""
    rows = [dict(prompt=f"{i} + {i} =", answer=2 * i) for i in range(n)]
    settings = SFTSettings(task="jsonl", data_file=written(tmp_path, rows))
    task = Jsonl(settings, True)
    test, train = ({row["prompt"] for row in task.rows[split]} for split in ("test", "train"))
    tenth = {row["prompt"] for row in rows if split_of(row["prompt"]) == "test"}
    assert tenth <= test and len(test) == max(least, len(tenth)) and not test & train and len(test | train) == n
    others = {zlib.crc32(prompt.encode()) for prompt in test - tenth}
    assert not others or max(others) < min(zlib.crc32(prompt.encode()) for prompt in train)
    assert (n < 1000) == (len(tenth) < 20)
    written(tmp_path, [*rows, *reversed(rows)])
    twice = Jsonl(settings, True)  # a prompt stays on one side
    assert not {row["prompt"] for row in twice.rows["test"]} & {row["prompt"] for row in twice.rows["train"]}
    assert len(twice.rows["test"]) >= min(2 * n // 5, 20)


def test_columns_of_other_names(tmp_path):
    """They take the place of a prompt and an answer of the file's own, and reward functions have them under both names.

    Not under a name that an argument of reward functions has."""
    rows = [dict(prompts=f"{i}=", prompt="no", answer="no", solution=i, level=2) for i in range(50)]
    path, names = written(tmp_path, rows), dict(prompt_column="prompts", answer_column="solution")
    assert rows_of(path, **names) == [dict(prompt=f"{i}=", answer=i, solution=i, level=2) for i in range(50)]
    path = written(tmp_path, [dict(question=f"{i}=", solution=i) for i in range(50)])
    both = rows_of(path, prompt_column="question", answer_column="solution")
    assert both == [dict(prompt=f"{i}=", answer=i, question=f"{i}=", solution=i) for i in range(50)]
    path = written(tmp_path, [dict(prompt=f"{i}", answer=f"{i}=") for i in range(50)])  # the other way round
    swapped = rows_of(path, prompt_column="answer", answer_column="prompt")
    assert all(row == dict(prompt=f"{row['answer']}=", answer=row["answer"]) for row in swapped)

    def mine(prompts, completions, question, solution, answer, **columns):
        return [float(a == s and q == p) for a, s, q, p in zip(answer, solution, question, prompts, strict=True)]

    load_reward_function("a:mine", {"a:mine": mine}, both[0])
    prompts = [row["prompt"] for row in both]
    assert total_rewards([mine], prompts, prompts, repeat_columns(both)).totals == [1.0] * 50
    assert rows_of(written(tmp_path, GOOD), prompt_column="prompt") == GOOD
    test_file = written(tmp_path, [dict(prompts="x", solution=1)], "test.jsonl")
    path = written(tmp_path, [dict(prompts=f"{i}=", solution=i) for i in range(50)])
    assert task_of(path, test_file=test_file, **names).rows["test"] == [dict(prompt="x", answer=1, solution=1)]
    wrong = names | dict(answer_column="solutoin")
    message = "data.jsonl:1: has no column solutoin; it has prompts, solution; name it with --answer_column=NAME"
    assert_refused(message, task_of, path, **wrong)
    path = written(tmp_path, [dict(messages=messages) for messages in conversations(30, "x")])
    with refusal("data.jsonl:1: has no column chat; it has messages; name it with --prompt_colu"):
        task_of(path, GRPOSettings, reward_funcs=["a:b"], prompt_column="chat")


def test_parquet(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install -r requirements-dev.txt")
    pyarrow, path = pytest.importorskip("pyarrow"), tmp_path / "rows.parquet"
    rows = [dict(prompt=conversation(i), answer=i, level=None) for i in range(50)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert rows_of(path) == rows and rows_of(path)[7].place == f"{path}: row 8"
    rows[3]["answer"] = None
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert_refused("rows.parquet: row 4: answer must be text, a number or a boolean, not None", task_of, str(path))
    path.write_bytes(b"PAR1")
    assert_refused("rows.parquet: cannot be read .ArrowInvalid", task_of, str(path))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    assert_refused("rows.parquet: cannot be read .ModuleNotFoundError: .*pyarrow", task_of, str(path))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", '[{"prompt": "x"}, 5]', "a.json: row 2: not an object but 5"),
        ("a.json", '[{"prompt": "x"}', "a.json: not JSON .JSONDecodeError"),
        ("a.jsonl", '[\n{"prompt": "x"},\n]', "a.jsonl: not JSON .JSONDecodeError: .*: line [23] column"),
        ("a.jsonl", '{"prompt": "x"},\n{"prompt": "y"}', "a.jsonl:1: not JSON .JSONDecodeError: Extra data"),
        ("a.jsonl", b"prompt\n\xff\n", "a.jsonl: cannot be read .UnicodeDecodeError: 'utf-8' codec can't decode"),
        ("no.jsonl", None, "no.jsonl: cannot be read .FileNotFoundError"),
        ("a.jsonl", "\n  \n", "a.jsonl: has no rows"),
        ("a.jsonl", '{"prompt": "a", "answer": 1}', "no row is in the test split .different prompts: 1.; name a"),
        ("a.jsonl", '{"prompt": "a", "stopped": 1}', "a.jsonl:1: column stopped has the name of an argument"),
    ],
)
def test_other_files_that_do_not_serve(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(message, task_of, str(tmp_path / name))


def test_an_evaluation_asks_no_prompt_twice(tmp_path):
    path = written(tmp_path, GOOD)
    held_out = len(task_of(path).rows["test"])
    run = SFTSettings(task="jsonl", data_file=path, block_size=400, out_dir=str(tmp_path / "run"))
    asked = [prepare(dataclasses.replace(run, eval_prompts=n)).settings.eval_prompts for n in (500, 1, 0)]
    assert asked == [held_out, 1, 0] and 1 < held_out < 500
    assert prepare(SFTSettings(out_dir=str(tmp_path / "run"))).settings.eval_prompts == 500  # computed: no end


def long_rows(tmp_path, name="data.jsonl", long=()):
    """50 prompts of two or three bytes each, those in `long` of 30."""
    prompts = [f"{i}=".rjust(30) if i in long else f"{i}=" for i in range(50)]
    return written(tmp_path, [dict(prompt=prompt, answer=str(i)) for i, prompt in enumerate(prompts)], name)


def test_the_longest_prompt_is_named(tmp_path):
    path, out_dir = long_rows(tmp_path, long={7, 20}), str(tmp_path / "run")
    run = GRPOSettings(task="jsonl", data_file=path, out_dir=out_dir, block_size=40, max_new_tokens=11)
    said = f"prompts of up to 30 tokens and max_new_tokens of up to 11 are more than block_size=40; shorten {path}:8, "
    assert_refused(f"{said}or add --drop_long_prompts", prepare, run)
    assert_refused("more than block_size=39$", prepare, dataclasses.replace(run, max_prompt_length=29, block_size=39))


def prompts_of(prepared):
    return sorted(row["prompt"] for rows in prepared.task.rows.values() for row in rows)


@pytest.mark.parametrize(
    "options, most",
    [
        (dict(block_size=40, max_new_tokens=10), 30),
        (dict(block_size=40, max_new_tokens=11), 3),
        (dict(block_size=40, max_new_tokens=37), 3),
        (dict(block_size=40, max_new_tokens=38), 2),
        (dict(block_size=61, max_prompt_length=29), 3),  # not cut, but dropped
        (dict(block_size=62, max_prompt_length=30), 30),
    ],
)
def test_long_prompts_are_dropped(tmp_path, options, most):
    held_out = next(i for i in range(50) if split_of(f"{i}=".rjust(30)) == "test")
    path, out_dir = long_rows(tmp_path, long={7, held_out}), str(tmp_path / "run")
    run = GRPOSettings(task="jsonl", data_file=path, out_dir=out_dir, drop_long_prompts=True, **options)
    everything = rows_of(path, eval_prompts=0)
    prepared = prepare(run)
    assert prompts_of(prepared) == sorted(row["prompt"] for row in everything if len(row["prompt"]) <= most)
    assert all(prepared.task.rows.values()) and prepared.settings.eval_prompts == len(prepared.task.rows["test"])
    count = sum(len(row["prompt"]) > most for row in everything)
    assert prepared.task.dropped == f", {count} too long and dropped"
    assert prepared.task.fingerprint() == task_of(path).fingerprint()  # of the file, so that a run can be resumed


def test_demonstrations_that_do_not_fit_are_dropped_with_their_prompts(tmp_path):
    """Each fits behind its own prompt; the longest demonstration need not fit behind the longest prompt."""
    rows = [dict(prompt=f"{i}=".rjust(20), answer="x" * (19 if i == 7 else 20 if i == 8 else 1)) for i in range(50)]
    rows += [dict(prompt="1", answer="x" * 38), dict(prompt="2", answer="x" * 39)]
    run = SFTSettings(task="jsonl", data_file=written(tmp_path, rows), out_dir=str(tmp_path / "run"), block_size=40)
    prepared = prepare(dataclasses.replace(run, drop_long_prompts=True))
    gone = [row["prompt"] for row in (rows[8], rows[51])]
    assert prompts_of(prepared) == sorted(row["prompt"] for row in rows if row["prompt"] not in gone)
    assert prepared.longest() == (20, 20)
    options = {name: getattr(run, name) for name in ("task", "data_file", "out_dir")}
    sampled = GRPOSettings(**options, max_prompt_length=8, max_new_tokens=0, block_size=48)
    assert prepare(sampled).longest() == (8, 40)  # prompts alone are cut
    assert_refused("20 tokens and demonstrations of up to 40 are more than block_size=40; shorten", prepare, run)


def test_messages_are_not_cut(tmp_path):
    """Their chat template would lose its head. A file's prompts are seen before the run, others when they are made."""
    get_tokenizer("bytes").save(tmp_path / "chat")
    # 16 bytes around a question, and the head of the answer.
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[answer] "
    (tmp_path / "chat/chat_template.jinja").write_text(template)
    options = dict(chat=True, tokenizer=str(tmp_path / "chat"), out_dir=str(tmp_path / "run"), block_size=80)
    options |= dict(n_layer=1, n_embd=16, batch_size=8, group_size=2, max_iters=1, max_new_tokens=4, eval_prompts=0)
    path = long_rows(tmp_path, long=range(0, 50, 2))  # 25 of 50 prompts have 30 bytes, the others 2 or 3
    run = GRPOSettings(task="jsonl", data_file=path, max_prompt_length=20, **options)
    message = "max_prompt_length=20 would cut a chat prompt of 47 tokens; raise it, or add"
    assert_refused(message, prepare, run)
    prepare(dataclasses.replace(run, max_prompt_length=47))
    assert len(prompts_of(prepare(dataclasses.replace(run, drop_long_prompts=True)))) == 25
    made = GRPOSettings(task="addition", max_prompt_length=26, **options)
    assert_refused("max_prompt_length=26 would cut a chat prompt of 27 tokens", main, prepare(made))
    evaluation = prepare(dataclasses.replace(made, max_prompt_length=0))
    evaluation.settings.max_prompt_length = 20
    assert_refused("would cut a chat prompt", evaluation.encode, evaluation.task.prompts("test", [0])[0]["prompt"])


def test_a_run_without_evaluations_needs_no_held_out_row(tmp_path, capsys):
    """It trains on all rows. When it is resumed, its file must be the same; an evaluation would ask what it learned."""
    path = written(tmp_path, GOOD)
    changes = dict(task="jsonl", data_file=path, demonstration_noise=0.0, eval_prompts=0, max_iters=1)
    sft, grpo = (merge_options(type(run), run, None, set(), **changes) for run in tiny(tmp_path))
    train_sft.main(prepare(sft))
    main(prepare(grpo))
    main(prepare(dataclasses.replace(grpo, plan=True)))
    said = capsys.readouterr().out
    assert said.count(": 50 prompts for training, 0 held out\n") == 2 and "peak_gib=" in said
    with refusal("sft has learned rows of data_file=.*data.jsonl that would be held out now; give --test_file"):
        prepare_evaluation(EvaluateSettings(), set(), sft.out_dir)
    other = dict(task="jsonl", test_file=written(tmp_path, [{"prompt": "x", "answer": 1}], "other.jsonl"))
    prepare_evaluation(*make_settings(EvaluateSettings, "", other), sft.out_dir)
    assert_refused("no row is held out; give --prompt=", sample.main, SampleSettings(), set(), sft.out_dir)
    prepare(dataclasses.replace(sft, resume="auto"))
    written(tmp_path, [*GOOD, {"prompt": "x", "answer": 1}])
    with refusal("data_file, test_file, eval_prompts=0 or .* has changed; restore them"):
        prepare(dataclasses.replace(sft, resume="auto", eval_prompts=5))
    with refusal("data_file, test_file, eval_prompts=0 or .* has changed; restore them"):
        prepare(dataclasses.replace(sft, resume="auto"))


def test_a_test_file_shares_nothing_with_the_data_file(tmp_path):
    other = written(tmp_path, [{"prompt": "x", "answer": 1}, GOOD[7]], "test.jsonl")
    with pytest.raises(SnugError, match=r"test.jsonl has 1 prompts of data_file, such as '7='; remove them"):
        task_of(written(tmp_path, GOOD), test_file=other)
    own = task_of(written(tmp_path, GOOD), test_file=written(tmp_path, [{"prompt": "x", "answer": 1}], "test.jsonl"))
    assert own.prompts("test", range(3)) == [{"prompt": "x", "answer": 1}] * 3 and len(own.rows["train"]) == 50
    with refusal("test.jsonl:1: answer must be text, a number or a boolean, not None; rows need an answer"):
        task_of(written(tmp_path, GOOD), test_file=written(tmp_path, [{"prompt": "x"}], "test.jsonl"))


def test_prompts_of_messages(tmp_path):
    """They need no chat, come out as they went in, and get the system's message where they have none."""
    told = ("system", "Add."), ("user", "1="), ("assistant", "1")
    rows = [{"prompt": conversation(i, *told[: i % 4]), "answer": i} for i in range(100)]
    path = written(tmp_path, rows)
    plain, chat = task_of(path), task_of(path, chat=True, system_prompt="Be brief.")
    splits = {split: plain.prompts(split, range(len(plain.rows[split]))) for split in ("train", "test")}
    assert sorted(row["answer"] for split in splits.values() for row in split) == list(range(100)) and splits["test"]
    for split, questions in splits.items():
        assert all(row == rows[row["answer"]] for row in questions)
        for row, spoken in zip(questions, chat.prompts(split, range(len(questions))), strict=True):
            system = [] if row["prompt"][0]["role"] == "system" else [{"role": "system", "content": "Be brief."}]
            assert spoken == row | {"prompt": system + row["prompt"]}
    assert plain.longest(lambda prompt, **_: range(len(prompt)) if isinstance(prompt, list) else prompt) == (4, 2)
    changed = [*rows[:-1], rows[-1] | {"prompt": conversation(7)}]
    assert plain.fingerprint() != task_of(written(tmp_path, changed)).fingerprint()


def test_an_epoch_has_every_row_once_and_a_row_follows_from_its_number(tmp_path):
    path = written(tmp_path, GOOD)
    task, n = task_of(path), len(task_of(path).rows["train"])
    epochs = [[row["prompt"] for row in task.prompts("train", range(e * n, (e + 1) * n))] for e in range(3)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1 and len(set(epochs[0])) == n and epochs[0] != epochs[1]
    for number in (2 * n + 3, 5, n + 1, 5):  # in any order, by a task of its own
        assert task_of(path).prompts("train", [number])[0]["prompt"] == epochs[number // n][number % n]
    assert [r["prompt"] for r in task_of(path, seed=9).prompts("train", range(n))] != epochs[0]


def test_the_reward_wants_a_text_and_nothing_else_or_a_last_number(tmp_path):
    task = task_of(written(tmp_path, GOOD))
    answers = [4, "Paris", 2.5, True, "a b", "4"]
    for right in (["4", " Paris\n", "2.5", "true", "a b", "4"], ["2+2=4.", "Paris", "$2.50 a day", "true", "a b", "4"]):
        assert task.rewards([""] * 6, right, answer=answers) == [1.0] * 6
    assert task.rewards([""] * 6, ["4 or 5", "paris", "2,5", "True", "a  b", "4."], answer=answers) == [0.0] * 6
    assert task.rewards([""], ["4"], answer=[4], stopped=[False]) == [0.0]
    assert task.rewards([""] * 2, ["1", "0"], answer=[True, False]) == [0.0] * 2  # no numbers


def test_votes_are_by_number_if_every_answer_is_one(tmp_path):
    texts = ["29 + 21 = 50.", " 50.0", "I do not know"]
    numbers, mixed = task_of(written(tmp_path, GOOD)), [*GOOD, {"prompt": "x", "answer": "fifty"}]
    assert [numbers.answer_of(text) for text in texts] == ["50", "50", None]
    for rows in (mixed, [row | {"answer": True} for row in GOOD], [{"prompt": str(i)} for i in range(50)]):
        other = task_of(written(tmp_path, rows), GRPOSettings)
        assert [other.answer_of(text) for text in texts] == ["29 + 21 = 50.", "50.0", "I do not know"]


DRESSES = ["{}", "I think it is {}.", "1 + 1 = {} apples", "**{}**", "\\boxed{{{}}}", "({}), I'd say!", "答案是{}。"]
numbers = st.one_of(st.integers(-(10**30), 10**30), st.floats(-1e30, 1e30).filter(lambda x: abs(x) > 1e-30))


@given(numbers, st.sampled_from(DRESSES))
def test_a_number_is_right_however_it_is_dressed(answer, dress):
    text, task = dress.format(text_of(answer)), Jsonl.__new__(Jsonl)
    task.only_numbers = True
    assert task.is_right(text, answer) and Fraction(task.answer_of(text)) == Fraction(repr(answer))
    assert not task.is_right(text, answer + 1 if abs(answer) < 1e9 else -answer)
    assert not task.is_right(f"{text} and not 12345.5", answer) and not task.is_right(f"{text}/3", answer)


def test_a_file_of_one_prompt_trains_whatever_its_hash(tmp_path):
    """One row, or eight of the same prompt; an evaluation needs another prompt, and the message counts prompts. Where an
    environment makes problems of other columns, eight rows are eight problems."""
    for text in "abcdefghijklmnopqrstuvwxyz":  # some would be held out
        for n in (1, 8):
            path = written(tmp_path, [dict(prompt=f"{text}=", answer=i) for i in range(n)])
            assert task_of(path, eval_prompts=0).size("train") == n
            assert_refused("row is in the (test|train) split .different prompts: 1.; name a test_file", task_of, path)
    assert sorted(map(len, task_of(path, GRPOSettings, environment="a:B").rows.values())) == [1, 7]
