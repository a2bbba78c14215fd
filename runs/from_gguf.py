"""Convert a GGUF file to a Hugging Face folder, which the other commands read.

    python -m runs.from_gguf SmolLM2-135M-Instruct.Q4_1.gguf --to=models/smollm2 [--dtype=bfloat16]

Weights are unpacked; memory holds one tensor at a time. What a GPT does not have is refused by name, and so is a rule
of cutting text that is not known (snug/tokenizer/gguf_pre.toml). The work is in snug/pretrained/gguf.py and
snug/tokenizer/gguf.py. Tests: tests/test_from_gguf.py, tests/test_real.py.
"""

import sys
from pathlib import Path

from settings import FromGGUFSettings
from snug.options import SnugError, friendly_errors, in_one_line, read_settings
from snug.options.progress import speak
from snug.pretrained.tensors import appearing
from snug.tokenizer import get_tokenizer


def main(settings: FromGGUFSettings, file: str):
    """Raises SnugError for a file that is no supported model, and if settings.to exists."""
    if not Path(file).is_file():
        raise SnugError(f"{file or 'no file'}: is not there; name a GGUF file")
    try:
        from snug.pretrained.gguf import convert
    except ImportError as error:
        raise SnugError(f"{error}: pip install -r requirements-gguf.txt") from None
    print(f"reading {file}", flush=True)
    with appearing(settings.to) as folder, in_one_line(f"{file}: cannot become a folder"):
        convert(file, folder, settings.dtype)
        chat = "--chat " if get_tokenizer(str(folder)).chat else ""
    print(f"{file} is now {settings.to}; next: python sample.py {settings.to} {chat}--prompt=Hi")


if __name__ == "__main__":
    with friendly_errors():
        speak()
        settings, _, file = read_settings(FromGGUFSettings, sys.argv[1:], positional="file")
        main(settings, file)
