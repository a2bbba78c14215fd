"""Checkpoints damaged at random, thousands of times: a resume refuses each in one line, and executes nothing.

    python tests/mutate.py --mutations=10000 [--seed=0]

A mutation is what a disk does to one file: it flips bits, cuts, empties, deletes or swaps it, or there is a pickle instead.
The checksums must catch it, unless the content is the same. A checkpoint with a manifest that fits is trusted, so no
mutation makes one. An audit hook watches Python meanwhile: nothing may load a pickle, execute code or write a file.
Prints one JSON object: mutations, how many were refused, by which file, and whether anything was wrong.
"""

import argparse
import io
import json
import pickle
import random
import shutil
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path[:0] = [str(HOME), str(HOME / "tests")]

import torch  # noqa: E402

import train_sft  # noqa: E402
from runs import checkpoint  # noqa: E402
from runs.prepare import prepare  # noqa: E402
from settings import SFTSettings  # noqa: E402
from snug.options import SnugError  # noqa: E402
from training.loop import begin  # noqa: E402

NAMES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
FORBIDDEN = """pickle.find_class exec compile os.system subprocess.Popen os.exec os.spawn os.posix_spawn ctypes.dlopen
socket.connect os.remove os.rename os.mkdir shutil.rmtree marshal.loads code.__new__""".split()
watching, caught = False, []


def watch(event, arguments):
    if watching and (
        event in FORBIDDEN or event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    ):
        caught.append((event, str(arguments)[:200]))


class Bomb:
    def __reduce__(self):
        return exec, ("open('/tmp/snug-was-here', 'w').close()",)


def by_a_disk(data, rng, others):
    """bytes -> bytes, or None if the file is to be deleted."""
    at = rng.randrange(len(data))
    flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    zeros = data[:at] + bytes(len(data) - at)
    return rng.choice(
        [flipped, flipped, zeros, data[:at], b"", None, data + b"\0", rng.choice(others), pickle.dumps(Bomb())]
    )


def attempt(settings):
    """Do what train_sft.py does before its first iteration -> "refused", "resumed", or what was wrong."""
    global watching
    watching = True
    try:
        begin(prepare(settings), torch.device("cpu"))
        return "resumed"
    except SnugError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except BaseException:
        return traceback.format_exc()
    finally:
        watching = False


def main(mutations, seed):
    rng, wrong, refused, resumed = random.Random(seed), [], dict.fromkeys(NAMES, 0), 0
    with tempfile.TemporaryDirectory() as home:
        settings = SFTSettings(
            n_layer=1, n_embd=16, out_dir=f"{home}/run", device="cpu", resume="auto", max_iters=2, eval_prompts=0
        )
        with redirect_stdout(io.StringIO()):
            train_sft.main(prepare(settings))
        path = checkpoint.newest(settings.out_dir)
        whole = {name: (path / name).read_bytes() for name in NAMES}
        attempt(settings)  # so that whatever is imported and compiled once is there
        sys.addaudithook(watch)
        for number in range(mutations):
            name = NAMES[rng.randrange(4)]
            data = by_a_disk(whole[name], rng, [whole[other] for other in NAMES if other != name])
            if data is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(data)
            ended = attempt(settings)
            harmless = data == whole[name] or name == "manifest.json" and same_json(data, whole[name])
            if caught or ended not in ("refused", "resumed") or ended == "resumed" and not harmless:
                wrong.append(f"mutation {number} of {name}: {ended} {caught} {(data or b'')[:300]!r}")
                caught.clear()
            refused[name] += ended == "refused"
            resumed += ended == "resumed"
            shutil.rmtree(path)
            path.mkdir()
            for other, content in whole.items():
                (path / other).write_bytes(content)
    if Path("/tmp/snug-was-here").exists():
        wrong.append("code was executed")
    print(json.dumps(dict(mutations=mutations, refused=refused, resumed=resumed, seed=seed, wrong=wrong[:20])))
    return wrong


def same_json(a, b):
    try:
        return a is not None and json.loads(a) == json.loads(b)
    except ValueError:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Damages checkpoints at random and looks whether that is told.")
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.exit(bool(main(arguments.mutations, arguments.seed)))
