"""Checkpoints damaged at random, thousands of times: an error that says so, or the very same weights; never anything executed.

    python tests/mutate.py --mutations=10000 [--seed=0]

Half of the mutations are what a disk does: bits flipped, bytes overwritten, files cut, emptied, gone, swapped. They must be
caught by the checksums. The other half come with checksums that fit, as if somebody had meant them: they meet the
parsers, and are JSON of other types, other keys, headers of other shapes, pickles. A run that resumes may end in a SnugError, or go on where only
the values differ (a weight is a weight). An audit hook watches what Python does meanwhile: a pickle loaded, code
compiled or executed, a process started, a file written, and the mutation has failed.
Prints one JSON object: mutations, how many were refused, by which file, and whether anything was wrong.
"""

import argparse
import json
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from pathlib import Path

HOME = Path(__file__).parent.parent
sys.path[:0] = [str(HOME), str(HOME / "tests")]

import torch  # noqa: E402

from options import SnugError  # noqa: E402
from runs import checkpoint  # noqa: E402
from runs.prepare import prepare  # noqa: E402
from runs.saver import Saver  # noqa: E402
from settings import SFTSettings  # noqa: E402
from training.guard import Guard  # noqa: E402
from training.optimizer import make_optimizer  # noqa: E402

NAMES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
FORBIDDEN = (
    "pickle.find_class",
    "exec",
    "compile",
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.spawn",
    "os.posix_spawn",
    "ctypes.dlopen",
)
FORBIDDEN += ("socket.connect", "os.remove", "os.rename", "os.mkdir", "shutil.rmtree", "marshal.loads", "code.__new__")
watching, caught = False, []


def watch(event, arguments):
    if watching and (
        event in FORBIDDEN or event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    ):
        caught.append((event, str(arguments)[:200]))


class Bomb:
    def __reduce__(self):
        return exec, ("open('/tmp/snug-was-here', 'w').close()",)


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    10**30,
    1e308,
    "",
    "x",
    "nan",
    [],
    [1, 2],
    {},
    {"a": 1},
    [[[]]],
    "../../etc/passwd",
    "\ud800",
]
JUNK += [
    float("nan"),
    float("inf"),
    "__import__('os').system('touch /tmp/snug-was-here')",
    {"__reduce__": ["os.system", "ls"]},
]


def by_a_disk(data, rng, others):
    """bytes -> bytes, or None: gone."""
    kind = rng.choice(["bit", "bit", "bytes", "cut", "empty", "gone", "longer", "zeros", "swap", "pickle"])
    at = rng.randrange(len(data))
    if kind == "bit":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "bytes":
        return data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at + 64 :]
    if kind == "zeros":
        return data[:at] + bytes(len(data) - at)
    return {
        "cut": data[:at],
        "empty": b"",
        "gone": None,
        "longer": data + b"\0",
        "swap": rng.choice(others),
        "pickle": pickle.dumps(Bomb()),
    }[kind]


def places(value, path=()):
    """Every path into nested JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(value, path, junk):
    if not path:
        return junk
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], junk)
    return copy


def by_intent(data, rng, others, name):
    """Of JSON and of a safetensors header: other values, keys taken out or put in. Else as by a disk."""
    if name == "state.json" and rng.random() < 0.8:
        value = json.loads(data)
        path = rng.choice(list(places(value)))
        if rng.random() < 0.3 and path and isinstance(path[-1], str):
            outer = value
            for key in path[:-1]:
                outer = outer[key]
            del outer[path[-1]]
            return json.dumps(value).encode()
        return json.dumps(put(value, path, rng.choice(JUNK))).encode()
    if name.endswith("safetensors") and rng.random() < 0.7:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        path = rng.choice(list(places(header)))
        text = json.dumps(put(header, path, rng.choice(JUNK))).encode()
        length = len(text) if rng.random() < 0.8 else rng.choice([0, 1, size, 2**31, 2**63, 2**64 - 1])
        return struct.pack("<Q", length) + text + data[8 + size :]
    return by_a_disk(data, rng, others)


def resume(settings):
    """What train_sft.py does before its first iteration."""
    prepared = prepare(settings)
    model, optimizer, iteration = checkpoint.begin(prepared.settings, prepared.shape, torch.device("cpu"))
    state = checkpoint.read_state(checkpoint.newest(settings.out_dir))
    Guard(settings, prepared.tokenizer, print, state.get("health"))
    return model, iteration


def too_long(*_):
    raise TimeoutError("20 seconds")


def attempt(settings, path, name, data, seal):
    """-> "refused", "resumed", or what was wrong."""
    global watching
    file = path / name
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)
    if seal and name != "manifest.json":
        checkpoint.seal(path)
    checkpoint.checked.clear()
    signal.alarm(20)
    watching = True
    try:
        resume(settings)
        return "resumed"
    except SnugError as error:
        return "refused" if "\n" not in str(error) else f"several lines: {error}"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} at {Path(place.filename).name}:{place.lineno}"
    finally:
        signal.alarm(0)
        watching = False


def main(mutations, seed):
    rng, wrong, refused, resumed = random.Random(seed), [], dict.fromkeys(NAMES, 0), 0
    with tempfile.TemporaryDirectory() as home:
        settings = SFTSettings(
            digits=2, n_layer=1, n_embd=16, block_size=24, out_dir=f"{home}/run", device="cpu", resume="auto"
        )
        prepared = prepare(settings)
        model = checkpoint.make_model(prepared.shape, torch.device("cpu"))
        optimizer = make_optimizer(model, settings)
        saver = Saver(settings, prepared.tokenizer, torch.device("cpu"), print)
        saver.save(2, model, optimizer, Guard(settings, prepared.tokenizer, print), last=True)
        path = checkpoint.newest(settings.out_dir)
        whole = {name: (path / name).read_bytes() for name in NAMES}
        resume(settings)  # so that whatever is imported and compiled once is there
        sys.addaudithook(watch)
        signal.signal(signal.SIGALRM, too_long)
        for number in range(mutations):
            name = NAMES[rng.randrange(4)]
            meant = rng.random() < 0.5 and name != "manifest.json"
            others = [whole[other] for other in NAMES if other != name]
            data = by_intent(whole[name], rng, others, name) if meant else by_a_disk(whole[name], rng, others)
            ended = attempt(settings, path, name, data, seal=meant)
            harmless = meant or data == whole[name] or name == "manifest.json" and same_json(data, whole[name])
            if caught or ended not in ("refused", "resumed") or ended == "resumed" and not harmless:
                wrong.append(
                    f"mutation {number} of {name} ({'meant' if meant else 'by a disk'}): {ended} {caught} {data[:300]!r}"
                )
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
