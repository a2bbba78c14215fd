"""A GGUF file as a Hugging Face folder, which the other commands read. transformers reads the file, not we.

    python -m tools.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf --to=models/smollm2 [--dtype=bfloat16]

Quantized weights are unpacked. Refused is what transformers would leave out in silence: tensors that the architecture
does not have (Llama 3's rope_freqs), scaled positions, sliding windows, and text cut by a rule that it does not know.
Left out: writing GGUF. Tests: tests/test_from_gguf.py, tests/test_real.py.
"""

import math
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from tokenizers import normalizers, pre_tokenizers

from options import SnugError, friendly_errors, in_one_line, read_settings
from pretrained.shapes import read_config, read_shape
from pretrained.tensors import appearing, entries, look_at_weights
from settings import FromGGUFSettings
from tokenizer import get_tokenizer

NAME, INSTEAD = "model.gguf", "use the model's own Hugging Face folder"
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
WHOLE_WORDS = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "tekken",
)  # a word that is a token is not merged up to it


def main(settings: FromGGUFSettings, file: str) -> None:
    """Raises SnugError for a file that is no supported model, and if settings.to exists."""
    missing = [name for name in ("transformers", "gguf", "accelerate") if not find_spec(name)]
    if missing:
        raise SnugError(f"from_gguf needs {', '.join(missing)}: pip install -r requirements-gguf.txt")
    if not Path(file).is_file():
        raise SnugError(f"{file or 'no file'}: is not there; name a GGUF file")
    with appearing(settings.to) as folder, in_one_line(f"{file}: cannot become a folder"):
        (folder / NAME).symlink_to(
            Path(file).resolve()
        )  # alone: transformers would look at what lies beside it
        model, tokenizer = read(folder, settings.dtype)
        (folder / NAME).unlink()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        words = "--chat --prompt=Hi" if get_tokenizer(str(folder)).chat else "--prompt=Hi"
        count = sum(math.prod(entry.shape) for entry in look_at_weights(folder))
        size = sum(path.stat().st_size for path in folder.iterdir()) / 2**30
    print(
        f"{settings.to}: {count:,} parameters, {size:.2f} GiB; next: python sample.py {settings.to} {words}"
    )


def read(folder: Path, dtype: str):
    """-> transformers' model, which forgets that it was quantized, and its tokenizer."""
    import torch
    import transformers
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    (metadata, _), header = read_gguf_metadata(folder / NAME), GgufHeader.from_file(folder / NAME)
    where = dict(gguf_file=NAME, local_files_only=True)
    config = transformers.AutoConfig.from_pretrained(folder, **where)
    config.save_pretrained(folder)
    check(folder, metadata, header.tensors)
    options = where | dict(config=config, dtype=getattr(torch, dtype), output_loading_info=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    if info["missing_keys"]:
        raise SnugError(f"no tensor is {min(info['missing_keys'])}")
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    ends = [
        metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if key in metadata
    ]
    model.generation_config.eos_token_id = list(dict.fromkeys(ends)) or None

    tokenizer, cut = (
        transformers.AutoTokenizer.from_pretrained(folder, **where),
        metadata.get("tokenizer.ggml.pre"),
    )
    if cut == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = DIGITS
    elif cut == "qwen2":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    elif cut in WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    return model, tokenizer


def check(folder: Path, metadata: dict, tensors: tuple) -> None:
    """Raises SnugError for what transformers would leave out of the model or its tokenizer."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    family, shape = read_config(folder)["model_type"], read_shape(folder)
    unread = {
        key: value
        for key, value in metadata.items()
        if ".rope.scal" in key or key.endswith(".sliding_window")
    }
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        cut = metadata.get("tokenizer.ggml.pre")
        unread |= (
            {}
            if cut in (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "smollm")
            else {"tokenizer.ggml.pre": cut}
        )
    for key, value in unread.items():
        if value != "none":
            raise SnugError(f"{key}={value!r:.40} is not supported; {INSTEAD}")
    wanted = entries(shape, family, shape["vocab_size"]) if shape["n_layer"] <= len(tensors) else []
    if Counter(tuple(sorted(each.shape)) for each in wanted) != Counter(
        tuple(sorted(each.shape)) for each in tensors
    ):
        odd = [
            f", perhaps {each.name:.40}"
            for each in tensors
            if each.name.endswith((".bias", "freqs.weight"))
        ]
        raise SnugError(
            f"its {len(tensors)} tensors are not those of a {family}{''.join(odd[:1])}; {INSTEAD}"
        )


if __name__ == "__main__":
    with friendly_errors():
        settings, _, file = read_settings(FromGGUFSettings, sys.argv[1:], positional="file")
        main(settings, file)
