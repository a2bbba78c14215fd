"""Convert a GGUF file to a Hugging Face folder, which the other commands read. transformers reads the file, not we.

    python -m runs.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf --to=models/smollm2 [--dtype=bfloat16]

Quantized weights are unpacked. transformers ignores some parts of a file in silence: tensors that the architecture does
not have (Llama 3's rope_freqs), scaled positions, sliding windows, rules of cutting text that it does not know. A file
with these is refused. Left out: writing GGUF. Tests: tests/test_from_gguf.py, tests/test_real.py.
"""

import math
import sys
from pathlib import Path

from tokenizers import normalizers, pre_tokenizers

from settings import FromGGUFSettings
from snug.options import SnugError, friendly_errors, in_one_line, read_settings
from snug.pretrained.shapes import read_config, read_shape
from snug.pretrained.tensors import appearing, entries, look_at_weights
from snug.tokenizer import get_tokenizer

NAME = "model.gguf"
ADVICE = "use the model's own Hugging Face folder"
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
# Their tokenizers do not merge a word that is a token.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")


def main(settings: FromGGUFSettings, file: str):
    """Raises SnugError for a file that is no supported model, and if settings.to exists."""
    if not Path(file).is_file():
        raise SnugError(f"{file or 'no file'}: is not there; name a GGUF file")
    problem = f"{file}: cannot become a folder; is requirements-gguf.txt installed?"
    with appearing(settings.to) as folder, in_one_line(problem):
        link = folder / NAME  # alone in a folder: transformers looks at what lies beside the file
        link.symlink_to(Path(file).resolve())
        model, tokenizer = read(folder, settings.dtype)
        link.unlink()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        chat = "--chat " if get_tokenizer(str(folder)).chat else ""
        look_at_weights(folder)
    print(f"{file} is now {settings.to}; next: python sample.py {settings.to} {chat}--prompt=Hi")


def read(folder: Path, dtype: str):
    """-> transformers' model, no longer marked as quantized, and its tokenizer."""
    import torch
    import transformers
    from transformers.integrations.gguf import GgufHeader, read_gguf_metadata

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    metadata, _ = read_gguf_metadata(folder / NAME)
    place = dict(gguf_file=NAME, local_files_only=True)
    config = transformers.AutoConfig.from_pretrained(folder, **place)
    config.save_pretrained(folder)
    check(folder, metadata, GgufHeader.from_file(folder / NAME).tensors)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=getattr(torch, dtype), output_loading_info=True, **place
    )
    if info["missing_keys"]:
        raise SnugError(f"no tensor is {min(info['missing_keys'])}")
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    stops = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    stops = [token for token in dict.fromkeys(stops) if token is not None]
    model.generation_config.eos_token_id = stops or None

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **place)
    cut, backend = metadata.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer
    if cut == "smollm":
        backend.pre_tokenizer = DIGITS
    elif cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    elif cut in WHOLE_WORDS:
        backend.model.ignore_merges = True
    return model, tokenizer


def check(folder: Path, metadata: dict, tensors: tuple):
    """Raises SnugError for what transformers would leave out of the model or its tokenizer."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    ignored = {
        key: value
        for key, value in metadata.items()
        if ".rope.scal" in key or key.endswith(".sliding_window")
    }
    cut, known = metadata.get("tokenizer.ggml.pre"), (*GGUF_PRE_TOKENIZER_SPLITS, "gpt-2", "smollm")
    if metadata.get("tokenizer.ggml.model") == "gpt2" and cut not in known:
        ignored["tokenizer.ggml.pre"] = cut
    for key, value in ignored.items():
        if value != "none":
            raise SnugError(f"{key}={value!r:.40} is not supported; {ADVICE}")

    family, shape = read_config(folder)["model_type"], read_shape(folder)
    wanted = []
    if shape["n_layer"] <= len(tensors):  # a damaged file may say millions
        wanted = entries(shape, family, shape["vocab_size"])
    if numbers_in(tensors) != numbers_in(wanted):
        raise SnugError(
            f"its {len(tensors)} tensors are not those of a {family} of its shape; {ADVICE}"
        )


def numbers_in(tensors) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


if __name__ == "__main__":
    with friendly_errors():
        settings, _, file = read_settings(FromGGUFSettings, sys.argv[1:], positional="file")
        main(settings, file)
