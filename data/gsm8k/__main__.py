"""Download GSM8K: python -m data.gsm8k prepare [folder]. Files that are already there are checked and kept."""

import hashlib
import http.client
import os
import sys
import urllib.request
from pathlib import Path

from options import SnugError, friendly_errors

SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
FILES = {  # name: SHA-256
    "train.jsonl": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test.jsonl": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
FOLDER = "data/gsm8k"
USAGE = "usage: python -m data.gsm8k prepare [folder]"
TIMEOUT = 30.0  # seconds without an answer from the server
MAX_BYTES = 2**26  # of a download; the larger file has 4 MB


def prepare(folder: str = FOLDER) -> None:
    """Put both files into `folder`, with the right checksums, and print one line for each. Raises SnugError."""
    for name, expected in FILES.items():
        path = Path(folder) / name
        part = path.with_name(f".{name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                check(path.read_bytes(), expected, path, "move it away, or name another folder")
                print(f"{path}: was there")
                continue
            data = download(SOURCE + name, path)
            check(data, expected, SOURCE + name, "nothing was written; try again")
            part.write_bytes(data)
            part.replace(path)
            print(f"{path}: downloaded")
        except OSError as error:
            part.unlink(missing_ok=True)
            raise SnugError(f"{path}: cannot be read or written ({error.strerror})") from None


def check(data: bytes, expected: str, source, remedy: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise SnugError(
            f"{source}: its {len(data):,} bytes have SHA-256 {found}, but should have {expected}; {remedy}"
        )


def download(url: str, path: Path) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            return response.read(MAX_BYTES)
    except (
        OSError,
        http.client.HTTPException,
    ) as error:  # no network, HTTP status, timeout; an incomplete answer
        why = f"{type(error).__name__}: {error}"
        raise SnugError(
            f"{url}: cannot be downloaded ({why}); try again, or copy it to {path}"
        ) from None


def main(words: list[str]) -> None:
    if words in (["-h"], ["--help"]):
        print(
            f"{USAGE}\n\nDownloads GSM8K's train.jsonl and test.jsonl, and checks them. The default folder is {FOLDER}."
        )
        return
    if not 1 <= len(words) <= 2 or words[0] != "prepare" or words[-1].startswith("-"):
        raise SnugError(f"{USAGE}, not {' '.join(words)!r:.60}; the default folder is {FOLDER}")
    prepare(*words[1:])


if __name__ == "__main__":
    with friendly_errors():
        main(sys.argv[1:])
