"""A run beside a neighbour that takes and frees memory, both inside a limit that the kernel enforces by killing.

    python bench/hungry.py 6.5 python grpo.py config/grpo_real.py --memory_budget_gb=auto

6.5: GiB for both. Needs root and Linux: it makes a cgroup, of version 2 or 1. The neighbour is a process. Again and again
it takes a random share of what is free, 64 MiB a second that it writes to, holds it for 5 to 40 seconds, and frees it.
It keeps away from the last 256 MiB. Prints what it took, and what the kernel killed.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MIB = 2**20
STEP, LAST = 64 * MIB, 256 * MIB


def make_cgroup(limit: int):
    """-> (folder, name of the file that has the use, that of the kills). Processes begin in it after `join`."""
    version_1 = (ROOT / "memory").exists()
    folder = ROOT / ("memory/snug" if version_1 else "snug")
    folder.mkdir(exist_ok=True)
    names = ["memory.max", "memory.current", "memory.events"]
    if version_1:
        names = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"]
    (folder / names[0]).write_text(str(limit))
    return folder, *names[1:]


def join(folder: Path):
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def free(folder: Path, limit: int, use: str) -> int:
    """Bytes below the limit, with the pages of files that the kernel can drop."""
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    files = sum(int(stat.get(f"total_{name}", stat[name])) for name in ("active_file", "inactive_file"))
    return limit - int((folder / use).read_text()) + files


def neighbour(folder: Path, limit: int, use: str):
    join(folder)
    draw, began = random.Random(0), time.monotonic()
    while True:
        held, share = [], draw.uniform(0.6, 1.0)
        wanted = share * (free(folder, limit, use) - LAST)
        while len(held) * STEP < wanted and free(folder, limit, use) > LAST + STEP:
            held.append(bytearray(os.urandom(1)) * STEP)
            time.sleep(1)
        print(f"[{time.monotonic() - began:.0f} s] neighbour: {len(held) * STEP / 2**30:.2f} GiB", file=sys.stderr)
        time.sleep(draw.uniform(5, 40))
        held.clear()
        time.sleep(draw.uniform(5, 20))


def main(gib: str, *command):
    limit = int(float(gib) * 2**30)
    folder, use, kills = make_cgroup(limit)
    child = os.fork()
    if not child:
        neighbour(folder, limit, use)
    began = time.monotonic()
    run = subprocess.Popen(command, preexec_fn=lambda: join(folder))
    code = run.wait()
    ended = os.waitpid(child, os.WNOHANG)[0]
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    print(f"exit code {code} after {time.monotonic() - began:.0f} s; neighbour {'killed' if ended else 'alive'}")
    print((folder / kills).read_text())
    folder.rmdir()


if __name__ == "__main__":
    main(*sys.argv[1:])
