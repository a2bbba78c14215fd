"""GGUF files of random models and of tokenizers trained here, as Hugging Face folders: the weights and ids that went in, those of
the library gguf for every quantized type, and of transformers. Damaged files are refused in one line.
"""

import copy
import itertools
import json
import math
import random
import shutil
import struct
import subprocess
import sys
import unicodedata
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import regex
import torch
from safetensors.torch import load_file
from test_pretrained import SMALL, logits_of
from test_tokenizer import STOP, folder_of, gpt2_like, ids_of, llama2_like, llama3_like, qwen_like, smollm2_like, texts

from model import GPT
from runs import from_gguf
from settings import FromGGUFSettings
from snug.options import SnugError, read_settings
from snug.tokenizer import get_tokenizer
from snug.tokenizer.gguf import TABLE

gguf = pytest.importorskip("gguf", reason="pip install -r requirements-gguf.txt")
transformers = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
read = pytest.importorskip("snug.pretrained.gguf").read
pytest.importorskip("accelerate", reason="pip install -r requirements-dev.txt")
gguf_tokenizers = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")

ROPE = dict(num_key_value_heads=2, rope_theta=5e3, head_dim=8)
CASES = {  # architecture: (transformers' config class, its keywords, tokenizer, how it cuts text)
    "llama": ("LlamaConfig", ROPE, smollm2_like, "smollm"),
    "qwen2": ("Qwen2Config", ROPE, qwen_like, "qwen2"),
    "qwen3": ("Qwen3Config", ROPE | dict(head_dim=16, tie_word_embeddings=True), llama3_like, "llama-bpe"),
    "gemma3": (
        "Gemma3TextConfig",
        dict(num_key_value_heads=2, rope_theta=5e3, head_dim=16, sliding_window=12),
        smollm2_like,
        "smollm",
    ),
    "gpt2": ("GPT2Config", dict(tie_word_embeddings=True, n_inner=48), gpt2_like, "gpt-2"),
}
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"
HOME = Path(__file__).parent.parent
F32 = gguf.GGMLQuantizationType.F32


def model_of(architecture, vocab_size, **more):
    name, options, *_ = CASES[architecture]
    options = SMALL | dict(vocab_size=vocab_size, max_position_embeddings=512) | options | more
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def names_of(spec):
    """-> every token by its id; ids without a token have a name as llama.cpp's converter gives it."""
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    known = {i: token for token, i in ids.items()}
    return [known.get(i, f"[PAD{i}]") for i in range(1 + max(known))]


def write_tokenizer(writer, spec, names, cut, stop):
    kinds = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    if spec["model"]["byte_fallback"]:
        kinds |= {i: 6 for i, name in enumerate(names) if regex.fullmatch("<0x..>", name)}
        kinds[names.index("<unk>")] = 2
        ranks = {"".join(pair): -rank for rank, pair in reversed([*enumerate(spec["model"]["merges"])])}
        writer.add_token_scores([float(ranks.get(name, -1e4 - i)) for i, name in enumerate(names)])
        writer.add_bos_token_id(names.index("<s>"))
        writer.add_unk_token_id(names.index("<unk>"))
    else:
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_tokenizer_model("llama" if spec["model"]["byte_fallback"] else "gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(names)
    writer.add_token_types([kinds.get(i, 1) for i in range(len(names))])
    writer.add_eos_token_id(names.index(stop))
    writer.add_chat_template(TEMPLATE)


def write_numbers(writer, architecture, config):
    numbers = dict(block_count=2, context_length=512, embedding_length=config.hidden_size)
    numbers["attention.head_count"] = config.num_attention_heads
    numbers["feed_forward_length"] = config.intermediate_size
    floats = {"attention.layer_norm_epsilon": 1e-5}
    if architecture != "gpt2":
        numbers |= {"attention.head_count_kv": 2, "rope.dimension_count": config.head_dim}
        numbers |= {"attention.key_length": config.head_dim}
        floats = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e3}
    if architecture == "gemma3":
        numbers["attention.sliding_window"] = config.sliding_window
    for name, value in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for name, value in floats.items():
        writer.add_float32(f"{architecture}.{name}", value)


def theirs_as_ggufs(architecture, model):
    """-> {name in the file: array}, as llama.cpp's converter writes them."""
    known, config = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2), model.config
    result = {}
    for name, value in model.state_dict().items():
        value, part = value.numpy(), name.split(".")[-2]
        heads = dict(q_proj=config.num_attention_heads, k_proj=2).get(part)
        if architecture == "llama" and heads:  # llama.cpp rotates neighbours, where Hugging Face rotates halves
            value = value.reshape(heads, 2, -1, config.hidden_size).swapaxes(1, 2).reshape(value.shape)
        if architecture == "gemma3" and part.endswith("norm"):
            value = value + 1
        if part in ("c_attn", "c_proj", "c_fc") and value.ndim == 2:
            value = value.T
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            result[known.get_name(name, (".weight", ".bias"))] = np.ascontiguousarray(value)
    return result


def stored_as(value, kind, rng):
    """Quantized, or random bytes where the library only unpacks."""
    if value.ndim == 1:
        return value, F32
    try:
        return gguf.quantize(value, kind), kind
    except NotImplementedError:
        size = gguf.quants.quant_shape_to_byte_shape(value.shape, kind)
        return rng.integers(0, 256, size, dtype=np.uint8), kind


def write(
    path,
    architecture="llama",
    family=None,
    cut=None,
    more=(),
    leave_out=(),
    rename=(),
    kind=F32,
    options=(),
    **metadata,
):
    """Write a GGUF file -> its model in transformers, its tokenizer.json as an object. more: extra tensors; rename: names."""
    *_, its_family, its_cut = CASES[architecture]
    spec = copy.deepcopy((family or its_family)())
    if not spec["model"]["byte_fallback"]:
        del spec["model"]["merges"][-9:]  # words that merges do not make, as Llama 3 has them
    names, writer = names_of(spec), gguf.GGUFWriter(path, architecture)
    model = model_of(architecture, len(names), **dict(options))
    write_numbers(writer, architecture, model.config)
    write_tokenizer(writer, spec, names, cut or its_cut, STOP.get(family or its_family, "</s>"))
    for key, value in metadata.items():
        writer.kv_data[0].pop(key, None)  # the library refuses a second value
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    rng = np.random.default_rng(4)
    for name, value in theirs_as_ggufs(architecture, model).items():
        if name not in leave_out:
            data, its_kind = stored_as(value, kind, rng)
            writer.add_tensor(dict(rename).get(name, name), data, raw_dtype=its_kind)
    for name, values in more:
        writer.add_tensor(name, np.array(values, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return model, spec


def convert(file, folder, *words):
    settings, _, place = read_settings(FromGGUFSettings, [str(file), f"--to={folder}", *words], positional="file")
    from_gguf.main(settings, place)


def converted(folder, *arguments, words=(), **more):
    """-> (the model in transformers, the tokenizer.json), and the file a.gguf is the folder out."""
    result = write(folder / "a.gguf", *arguments, **more)
    convert(folder / "a.gguf", folder / "out", *words)
    return result


def check_logits(folder, theirs):
    tokens = torch.randint(1000, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(tokens).logits
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(logits_of(GPT.from_pretrained(folder), tokens), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", CASES)
def test_weights_and_ids_are_those_that_went_in(architecture, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")  # what lies beside the file does not matter
    theirs, spec = converted(tmp_path, architecture)
    assert f"a.gguf is now {tmp_path}/out; next: python sample.py" in capsys.readouterr().out
    check_logits(tmp_path / "out", theirs)
    ours, family = get_tokenizer(str(tmp_path / "out")), CASES[architecture][2]
    original = get_tokenizer(folder_of(tmp_path / "in", spec, tokenizer_config=dict(eos_token=STOP[family])))
    alone = [original.decode([i]) for i in range(original.n_vocab)]
    for text in [*texts(500), *alone, "a  1\n\n2", "e\u0301 1234"]:
        if "<tool e\u0301" in text:  # a file does not say that a token is looked for in normalized text
            continue
        for special in (True, False):
            assert ours.encode(text, special) == original.encode(text, special), text
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert (ours.stop_tokens, ours.special, ours.bos) == (original.stop_tokens, original.special, [])
    assert ours.chat.source == TEMPLATE
    backend = transformers.AutoTokenizer.from_pretrained(tmp_path / "out").backend_tokenizer
    assert all(ids_of(backend, text, True) == ours.encode(text, True) for text in texts(100))


KINDS = [F32, gguf.GGMLQuantizationType.F16, *gguf.quants._type_traits]


@pytest.mark.filterwarnings("ignore:.*value encountered:RuntimeWarning")  # random scales
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_is_unpacked_as_the_library_does(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("snug.pretrained.gguf.PIECE", 3000)  # pieces of a few rows
    wide = dict(hidden_size=256, intermediate_size=512, head_dim=64)
    write(tmp_path / "a.gguf", kind=kind, options=wide)
    for dtype in ("float32", "bfloat16"):
        with warnings.catch_warnings(action="error"):
            convert(tmp_path / "a.gguf", tmp_path / dtype, f"--dtype={dtype}")
        ours = load_file(tmp_path / dtype / "model.safetensors")
        known, types = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2), set()
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
        assert len(stored) == len(ours)
        for name, value in ours.items():
            tensor = stored[known.get_name(name, (".weight",))]
            expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).to(value.dtype)
            if heads := dict(q_proj=4, k_proj=2).get(name.split(".")[-2]):
                value = value.reshape(heads, 2, 32, 256).swapaxes(1, 2).reshape(value.shape)
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
            types.add(tensor.tensor_type)
        assert {kind, F32} == types and {str(value.dtype) for value in ours.values()} == {f"torch.{dtype}"}


def test_what_is_read_is_what_the_librarys_reader_reads(tmp_path):
    write(
        tmp_path / "a.gguf",
        kind=gguf.GGMLQuantizationType.Q8_0,
        options=dict(intermediate_size=64),
        **{"general.x": [1.5, -2.0], "general.y": [True], "general.z": -3},
    )
    metadata, tensors = read(tmp_path / "a.gguf")
    theirs = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert metadata == fields and list(map(type, metadata.values())) == list(map(type, fields.values()))
    found = {t.name: (t.tensor_type, t.shape.tolist()[::-1], t.data_offset, t.n_bytes) for t in theirs.tensors}
    assert found == {name: (t.kind, t.shape, t.start, math.prod(t.stored)) for name, t in tensors.items()}


def test_bfloat16_and_several_stop_tokens(tmp_path):
    converted(tmp_path, words=["--dtype=bfloat16"], **{"tokenizer.ggml.eot_token_id": 2})
    assert {p.dtype for p in GPT.from_pretrained(tmp_path / "out", dtype="bfloat16").parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert get_tokenizer(str(tmp_path / "out")).stop_tokens == (0, 2)
    with pytest.raises(SnugError, match="is there already"):
        convert(tmp_path / "a.gguf", tmp_path / "out")


def llama3_divisors(factor=32.0, original=8192, size=8, theta=5e5):
    """As llama.cpp's converter computes them, wave by wave."""
    result = []
    for i in range(0, size, 2):
        wave = 2 * np.pi * theta ** (i / size)
        kept = (original / wave - 1) / (4 - 1)
        inside = 1 / ((1 - kept) / factor + kept) if original / 4 <= wave <= original else None
        result.append(inside or (1.0 if wave < original / 4 else factor))
    return result


LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192, rope_theta=5e5)
LINEAR = dict(rope_type="linear", factor=4.0, rope_theta=5e3)
SCALED = {  # how transformers writes it: how llama.cpp does
    "llama3": (LLAMA3, {"more": [("rope_freqs.weight", llama3_divisors())], "llama.rope.freq_base": 5e5}),
    "linear": (LINEAR, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
    "linear, as old files say it": (LINEAR, {"llama.rope.scale_linear": 4.0}),
    "linear without a type": (LINEAR, {"llama.rope.scaling.factor": 4.0}),
    "none": (dict(rope_type="default", rope_theta=5e3), {"llama.rope.scaling.type": "none"}),
}


@pytest.mark.parametrize("scaling", SCALED)
def test_positions_are_scaled_as_the_file_says(scaling, tmp_path):
    theirs, ours = SCALED[scaling]
    check_logits(tmp_path / "out", converted(tmp_path, options=dict(rope_parameters=theirs), **ours)[0])


REFUSED = {  # what is said: how the file differs
    "rope_freqs.weight is not by Llama 3's rule": dict(more=[("rope_freqs.weight", llama3_divisors(original=1000))]),
    "missing or surplus in a llama of its shape: ['blk.0.attn_q.bias']": dict(more=[("blk.0.attn_q.bias", [1] * 32)]),
    "of its shape: ['blk.1.ffn_up.weight']": dict(leave_out=["blk.1.ffn_up.weight"]),
    "['blk.1.ffn_pu.weight', 'blk.1.ffn_up.weight']": dict(rename={"blk.1.ffn_up.weight": "blk.1.ffn_pu.weight"}),
    "of its shape: ['blk.10.attn_k.weight', ": {"llama.block_count": 9000},
    "n_layer=2147483647 is more than 9999": {"llama.block_count": 2**31 - 1},
    "needed are ('F32', 'F16', 'BF16', 'F64') and (32, 2147483647)": {"llama.feed_forward_length": 2**31 - 1},
    "num_attention_heads=0 is not a valid int": {"llama.attention.head_count": 0},
    "tokenizer.ggml.model='gpt2' with tokenizer.ggml.pre='stone' is not supported": dict(cut="stone"),
    "tokenizer.ggml.model='t5' with": {"tokenizer.ggml.model": "t5"},
    "rope.scaling.type='yarn' is not supported": {"llama.rope.scaling.type": "yarn"},
    "attention.sliding_window=64 is not supported": {"llama.attention.sliding_window": 64},
    "general.architecture='gemma2' is not supported; only 'gpt2' or 'llama'": {"general.architecture": "gemma2"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_would_be_left_out_in_silence_is_refused(said, tmp_path):
    with pytest.raises(SnugError) as error:
        converted(tmp_path, **REFUSED[said])
    assert said in str(error.value) and "\n" not in str(error.value) and str(tmp_path / "a.gguf") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_what_is_no_gguf_file(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"\x80\x04." * 20)
    for name, said in (
        ("a.gguf", "it is no little-endian GGUF file of version 2 or 3"),
        ("b", "b: is not there; name a GGUF file"),
        ("", "is not there"),
    ):
        with pytest.raises(SnugError, match=said):
            convert(tmp_path / name, tmp_path / "out")
    with pytest.raises(SnugError, match="name the new folder: --to="):
        read_settings(FromGGUFSettings, ["a.gguf"], positional="file")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "snug.pretrained.gguf")
    with pytest.raises(SnugError, match="import of gguf halted.*: pip install -r requirements-gguf.txt"):
        convert(tmp_path / "a.gguf", tmp_path / "out")


# -----------------------------------------------------------------------------
# Tokenizers

TEXT = "He'LL it's  a_b\n\n 12345 Ünï中文。x'y (z)\r\n"
PIECES = {  # what the rules make of TEXT, by hand
    "gpt-2": "He|'|LL| it|'s| | a|_|b|\n\n| 12345| Ünï中文|。|x|'|y| (|z|)|\r\n",
    "smollm": "He|'|LL| it|'s| | a|_|b|\n\n |1|2|3|4|5| Ünï中文|。|x|'|y| (|z|)|\r\n",
    "qwen2": "He|'LL| it|'s| | a|_b|\n\n| |1|2|3|4|5| Ünï中文|。x|'y| (|z|)\r\n",
    "megrez": "He|'LL| it|'s| | a|_b|\n\n| |1|2|3|4|5| Ünï中文|。x|'y| (|z|)\r\n",
    "llama-bpe": "He|'LL| it|'s| | a|_b|\n\n| |123|45| Ünï中文|。x|'y| (|z|)\r\n",
    "dbrx": "He|'LL| it|'s| | a|_b|\n\n| |123|45| Ünï中文|。x|'y| (|z|)\r\n",
    "tekken": "He|'LL| it|'s| | a|_b|\n\n| |1|2|3|4|5| Ünï中文|。x|'y| (|z|)\r\n",
    "gpt-4o": "He'LL| it's| | a|_b|\n\n| |123|45| Ünï中文|。x|'y| (|z|)\r\n",
    "seed-coder": "He|'LL| it|'s| | a|_b|\n\n| |1|2|3|4|5| Ünï中文|。x|'y| (|z|)|\r\n",
    "deepseek-llm": "He|'|LL| it|'|s| | a|_|b|\n|\n| |1|2|3|4|5| Ü|n|ï|中文|。|x|'|y| (|z|)|\r|\n",
    "deepseek-coder": "He|'|LL| it|'|s| | a|_|b|\n|\n| |1|2|3|4|5| Ünï|中文|。|x|'|y| (|z|)|\r|\n",
    "default": "He|'|LL| it|'|s| | a|_|b|\n\n| |123|45| Ünï中文|。|x|'|y| |(|z|)|\r\n",
}


def test_each_rule_has_an_example():
    assert {rule["names"][0] for rule in TABLE} == PIECES.keys()


def whole_texts(backend, text):
    """-> the pieces in which a tokenizer merges bytes."""
    spelled = {symbol: byte for byte, symbol in gguf_tokenizers.bytes_to_unicode().items()}
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(spelled[symbol] for symbol in piece).decode() for piece, _ in pieces]


@pytest.mark.parametrize("cut", PIECES)
def test_texts_are_cut_by_the_rule(cut, tmp_path):
    """As by hand, and as by transformers where it knows the rule."""
    converted(tmp_path, "qwen3", cut=cut, **{"tokenizer.ggml.bos_token_id": 0})
    ours = get_tokenizer(str(tmp_path / "out"))
    assert whole_texts(ours.backend, TEXT) == PIECES[cut].split("|")
    assert ours.bos == [0] * (cut in ("llama-bpe", "tekken"))
    if cut in gguf_tokenizers.GGUF_PRE_TOKENIZER_SPLITS or cut == "gpt-2":
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf").backend_tokenizer
        if cut in ("llama-bpe", "tekken"):  # it does not know
            theirs.model.ignore_merges = True
        for text in texts(500):
            text = unicodedata.normalize("NFC", text) if cut == "qwen2" else text  # nor this
            assert ours.encode(text) == ids_of(theirs, text, False), text


@pytest.mark.parametrize("says", [True, False])
def test_the_file_says_whether_texts_begin_with_bos(says, tmp_path):
    flags = {"tokenizer.ggml.add_bos_token": says, "tokenizer.ggml.bos_token_id": 1}
    converted(tmp_path, family=llama3_like, cut="llama-bpe" if not says else "qwen2", **flags)
    assert get_tokenizer(str(tmp_path / "out")).bos == [1] * says


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


def backwards():
    """Its best token is the last one."""
    spec = copy.deepcopy(llama2_like())
    last = len(spec["model"]["vocab"]) - 1
    spec["model"]["vocab"] = {name: i if i < 259 else 259 + last - i for name, i in spec["model"]["vocab"].items()}
    return spec


@pytest.mark.parametrize("space", [True, False])
def test_sentencepiece(space, tmp_path):
    """As by the loop above, and with a space before the text as by transformers."""
    _, spec = converted(tmp_path, family=backwards, **{"tokenizer.ggml.add_space_prefix": space})
    ours, names = get_tokenizer(str(tmp_path / "out")), names_of(spec)
    metadata, _ = read(tmp_path / "a.gguf")
    scores, kinds = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf").backend_tokenizer
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (ours.bos, ours.stop_tokens, again("a").input_ids) == ([1], (2,), [1, *ours.encode("a")])
    spelled = ["▁", *(name for name, kind in zip(names, kinds, strict=True) if kind != 1)]
    for text in texts(500):
        if text and not any(name in text for name in spelled):
            assert ours.encode(text) == sentencepiece_ids(" " * space + text, names, scores), text
            if space and text[0] != " ":  # transformers adds none before another one, but sentencepiece does
                assert ours.encode(text) == ids_of(theirs, text, False)
            assert ours.decode(ours.encode(text)) == text


# -----------------------------------------------------------------------------
# Damaged files


def entry(name, *numbers, form):
    """A key or the name of a tensor, and the numbers behind it."""
    return struct.pack(f"<Q{len(name)}s{form}", len(name), name.encode(), *numbers)


def key(name, *numbers):
    return entry(name, *numbers, form="IIQ"[: len(numbers)])


def query(dims=2, kind=0, offset=153600, columns=32):
    """The head of a tensor: its name, dimensions, type, and where it is."""
    return entry("blk.0.attn_q.weight", dims, columns, 32, kind, offset, form="IQQIQ")


LIST, PRE, HUGE = "general.x", "tokenizer.ggml.pre", 2**60
HOSTILE = {  # how the bytes change: what is said
    "a list goes on": (
        key(LIST, 9, 5, 1000),
        key(LIST, 9, 5, HUGE),
        "the file is cut off or damaged: it has 420704 bytes, not 4611686018427",
    ),
    "a list of small numbers goes on": (key(LIST, 9, 5, 1000), key(LIST, 9, 0, HUGE), "the file is cut off"),
    "lists in a list": (key(LIST, 9, 5, 1000), key(LIST, 9, 9, HUGE), "KeyError: <GGUFValueType.ARRAY: 9>"),
    "texts go on": (
        key("tokenizer.ggml.tokens", 9, 8, 1200),
        key("tokenizer.ggml.tokens", 9, 8, HUGE),
        "the file is cut off",
    ),
    "a text goes on": (entry(PRE, 8, 6, form="IQ"), entry(PRE, 8, HUGE, form="IQ"), "the file is cut off"),
    "no such type of a value": (
        key("llama.block_count", 4),
        key("llama.block_count", 99),
        "99 is not a valid GGUFValueType",
    ),
    "no such type of a tensor": (query(), query(kind=99), "99 is not a valid GGMLQuantizationType"),
    "a type that is not unpacked": (query(), query(kind=26), "I32 is not yet implemented"),
    "behind the end": (query(), query(offset=2**40), "the file is cut off"),
    "far behind the end": (query(), query(offset=2**64 - 32), "the file is cut off"),
    "in another tensor": (query(), query(offset=32), "blk.0.attn_q.weight overlaps another tensor"),
    "dimensions without end": (query(), query(dims=2**32 - 1), "the file is cut off"),
    "a huge matrix": (query(), query(columns=HUGE), "the file is cut off"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The bytes of a small file."""
    folder = tmp_path_factory.mktemp("gguf")
    write(folder / "a.gguf", **{LIST: [7] * 1000})
    return (folder / "a.gguf").read_bytes()


def refusal(folder, data):
    """-> what is said of a file with these bytes, "" if it becomes a folder."""
    (folder / "a.gguf").write_bytes(data)
    try:
        convert(folder / "a.gguf", folder / "out")
    except SnugError as error:
        assert "\n" not in str(error) and str(error).startswith(f"{folder}/a.gguf: cannot become a folder (")
        return str(error)
    shutil.rmtree(folder / "out")
    return ""


@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_numbers_are_refused(change, data, tmp_path, recwarn):
    old, new, said = HOSTILE[change]
    assert data.count(old) == 1
    told = refusal(tmp_path, data.replace(old, new))
    assert told and said in told
    assert not recwarn.list


@pytest.mark.parametrize("start", [8, 16])  # where the counts of tensors and of keys are
def test_hostile_counts_are_refused(start, data, tmp_path):
    assert refusal(tmp_path, data[:start] + struct.pack("<Q", HUGE) + data[start + 8 :])


def test_big_endian_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "GGUFWriter", partial(gguf.GGUFWriter, endianess=gguf.GGUFEndian.BIG))
    with pytest.raises(SnugError, match="it is no little-endian GGUF file"):
        converted(tmp_path)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.long)])
def test_damaged_files_are_refused_in_one_line(count, data, tmp_path, recwarn):
    rng, refused = random.Random(count), 0
    for _ in range(count):
        damaged, place = bytearray(data), rng.randrange(60000)
        kind = rng.choice(["cut", "flip", "huge"])
        if kind == "cut":
            del damaged[rng.choice([place, rng.randrange(len(data))]) :]
        elif kind == "flip":
            damaged[place] ^= 1 << rng.randrange(8)
        else:
            damaged[place : place + 8] = struct.pack("<Q", HUGE + rng.randrange(2**60))
        refused += bool(refusal(tmp_path, bytes(damaged)))
    assert refused > count / 2 and not recwarn.list  # others have a damaged name of a token, or weight


def test_the_command_says_it_in_one_line(data, tmp_path):
    (tmp_path / "a.gguf").write_bytes(data[:50000])
    command = [sys.executable, "-m", "runs.from_gguf", tmp_path / "a.gguf", f"--to={tmp_path}/out"]
    result = subprocess.run(command, cwd=HOME, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1) and "the file is cut off" in result.stderr
