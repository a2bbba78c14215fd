"""examples/gguf.py: small files that the library gguf writes become the folders that went in, weights and ids."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch

from helpers.commands import python
from helpers.families import transformers
from helpers.gguf_files import CASES, KINDS, TEMPLATE, gguf, names_of, write
from helpers.models import logits_of
from helpers.runs import refused
from helpers.tokenizers import STOP, folder_of, llama2_like, texts
from model import GPT
from snug.tokenizer import get_tokenizer

from examples.gguf import main  # isort: skip, it needs what helpers.gguf_files asks for


def converted(folder, *arguments, words=(), **more):
    """-> (the model in transformers, the tokenizer.json), and the file a.gguf is the folder out."""
    result = write(folder / "a.gguf", *arguments, **more)
    main([str(folder / "a.gguf"), f"--to={folder}/out", *words])
    return result


@pytest.mark.parametrize("architecture", CASES)
def test_weights_and_ids_are_those_that_went_in(architecture, tmp_path, capsys):
    theirs, spec = converted(tmp_path, architecture)
    assert f"a.gguf is now {tmp_path}/out, a folder" in capsys.readouterr().out
    tokens = torch.randint(1000, (2, 40), generator=torch.Generator().manual_seed(5))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close([*again.parameters()], [*theirs.parameters()])
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(logits_of(GPT.from_pretrained(tmp_path / "out"), tokens), expected, atol=1e-5, rtol=1e-5)
    ours, stop = get_tokenizer(str(tmp_path / "out")), STOP[CASES[architecture][2]]
    original = get_tokenizer(folder_of(tmp_path / "in", spec, tokenizer_config=dict(eos_token=stop)))
    for text in [*texts(500), *map(original.decode, [[i] for i in range(original.n_vocab)]), "e\u0301 1234"]:
        if "<tool e\u0301" in text:  # a file does not say that a token is looked for in normalized text
            continue
        if architecture == "gemma3" and "▁" in text or original.special.get("<unk>") in original.encode(text):
            continue
        for special in (True, False):
            assert ours.encode(text, special) == original.encode(text, special), text
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert (ours.stop_tokens, ours.special, ours.bos) == (original.stop_tokens, original.special, original.bos)
    assert ours.chat.source == TEMPLATE


def test_quantized_weights_in_bfloat16_and_several_stop_tokens(tmp_path):
    more = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    theirs, _ = converted(tmp_path, words=["--dtype=bfloat16"], kind=KINDS.Q8_0, **more)
    ours = GPT.from_pretrained(tmp_path / "out", dtype="bfloat16").embedding.weight
    rounded = gguf.dequantize(gguf.quantize(theirs.model.embed_tokens.weight.detach().numpy(), KINDS.Q8_0), KINDS.Q8_0)
    assert ours.equal(torch.from_numpy(rounded).bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    tokenizer = get_tokenizer(str(tmp_path / "out"))
    assert (tokenizer.stop_tokens, tokenizer.bos) == ((0, 2), [1])


def sentencepiece_ids(text, names, scores):
    """The neighbours whose union has the best score are merged first, the leftmost of several; then bytes. As Google wrote it."""
    pieces, ids = list(text.replace(" ", "▁")), {name: i for i, name in enumerate(names)}
    while pairs := [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]:
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    found = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece(space, tmp_path):
    """Its best token is the last one, and merges follow from scores."""
    spec = copy.deepcopy(llama2_like())
    last = len(spec["model"]["vocab"]) - 1
    spec["model"]["vocab"] = {name: i if i < 259 else 259 + last - i for name, i in spec["model"]["vocab"].items()}
    converted(tmp_path, "gemma3", spec=spec, **{"tokenizer.ggml.add_space_prefix": space})
    ours, names = get_tokenizer(str(tmp_path / "out")), names_of(spec)
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    scores, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("scores", "token_type"))
    assert (ours.bos, ours.stop_tokens) == ([1], (2,))
    spelled = ["▁", *(name for name, kind in zip(names, kinds, strict=True) if kind != 1)]
    for text in texts(500):
        if text and not any(name in text for name in spelled):
            assert ours.encode(text) == sentencepiece_ids(" " * space + text, names, scores), text
            assert ours.decode(ours.encode(text)) == text


REFUSED = {  # what is said: how the file differs
    "rope_freqs.weight: a llama with this tensor is not supported": dict(more={"rope_freqs.weight": np.ones(4, "f4")}),
    "tokenizer.ggml.pre=stone is not supported": {"tokenizer.ggml.pre": "stone"},
    "rope.scaling.type=yarn is not supported": {"llama.rope.scaling.type": "yarn"},
    "rope.scaling.factor=4.0 is not supported": {"llama.rope.scaling.factor": 4.0},
    "a llama with a sliding window is not supported": {"llama.attention.sliding_window": 64},
    "general.architecture=gemma2 is not one of llama, qwen2, gemma3": {"general.architecture": "gemma2"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_be_left_out_in_silence_is_refused(said, tmp_path):
    message = refused(converted, tmp_path, **REFUSED[said])
    assert said in message and str(tmp_path / "a.gguf") in message
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_what_is_no_gguf_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"\x80\x04." * 20)
    result = python("-m", "examples.gguf", tmp_path / "a.gguf", f"--to={tmp_path}/out")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "cannot become a folder" in result.stderr
