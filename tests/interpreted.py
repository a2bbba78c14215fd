"""Triton kernels without a GPU: tests of values in the interpreter, and what the compiler makes of a kernel.

The interpreter has to be chosen before the kernels are imported. So a file of kernel tests runs itself again in a
process of its own with TRITON_INTERPRET=1 (`run_interpreted`); its tests marked `in_kernels` run there, and on CUDA.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from helpers.commands import python
from helpers.models import DEVICE
from snug.kernels import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = INTERPRETED or DEVICE == "cuda"
in_kernels = pytest.mark.skipif(not KERNELS, reason="runs in the interpreter's process, or on CUDA")
compiles = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")
# T4; A100; RTX 3090; RTX 4090, L4; H100, H200; B200; RTX 5090. The two most common ones always, the others with --long.
CAPABILITIES = [80, 90, *(pytest.param(sm, marks=pytest.mark.long) for sm in (75, 86, 89, 100, 120))]

AMD = {"gfx942": 64, "gfx1100": 32}  # MI300, RX 7900: lanes of a warp

# Bytes of shared memory that a program may ask for.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHARED = {capability: kib * 1024 for capability, kib in SHARED.items()}

if INTERPRETED:  # to the interpreter a comparison of numbers is as wide as they are, and from Triton 3.9 on no mask
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def keep_bool(builder, shape, value):
        if value.data.dtype == bool:
            value = TensorHandle(value.data, triton.language.int1)
        return splat(builder, shape, value)

    InterpreterBuilder.create_splat = keep_bool


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def forbid_plain_torch(monkeypatch, *places):
    """In the interpreter's process and on CUDA plain torch must not stand in for a kernel, except in float64.

    places: (module, name of the function in plain torch)."""

    def guarded(function):
        return lambda x, *rest: function(x, *rest) if x.dtype == torch.float64 else pytest.fail("plain torch ran")

    for module, name in places if KERNELS else ():
        monkeypatch.setattr(module, name, guarded(getattr(module, name)))


def run_interpreted(file, at_least, request=None):
    """Run a file's tests in the interpreter; so many have to pass. request: the test's, with whose --long they run."""
    chosen = request and request.config.getoption("long")
    if chosen and request.node.get_closest_marker("long"):
        chosen = "too"  # what it runs is all long
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    words += {"too": ["--long"], "only": ["--long-only"]}.get(chosen, [])
    result = python(*words, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout[-4000:]
    passed = int(re.search(r"(\d+) passed", result.stdout)[1])
    assert passed >= (1 if chosen == "only" else at_least), result.stdout[-4000:]


def in_the_interpreter(file, at_least):
    """-> a test that runs a file's tests in the interpreter; so many have to pass."""

    @compiles
    @pytest.mark.long
    @pytest.mark.skipif(triton is None, reason="Triton is not installed")
    def test(request):
        run_interpreted(file, at_least, request)

    return test


def compile_for_amd(source, options):
    """With what `launch` leaves of the options."""
    options.pop("maxnreg", None)
    for name, lanes in AMD.items():
        target = triton.backends.compiler.GPUTarget("hip", name, lanes)
        compiled = triton.compile(source, target=target, options=options)
        assert compiled.metadata.shared <= 64 * 1024


def local_memory_in_loops(sass):
    """-> how many instructions of the innermost loops read or write local memory, which is where spilled registers go."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", sass)]
    jumps = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text))]
    loops = [(begin, end) for begin, end in jumps if begin < end]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    local = [at for at, text in code if re.search(r"\b(LDL|STL)\b", text)]
    return sum(begin <= at <= end for at in local for begin, end in inner)


def resources_of(kernel, capability, pointers, constants, aligned, warps, folder, **options):
    """Compile -> what cuobjdump says of the binary, e.g. {"REG": 63, "STACK": 0, "LOCAL": 0, ...}, and its PTX.
    "SHARED" is what a launch asks for, "LOOP" what `local_memory_in_loops` counts: a kernel that sets an address aside
    before a loop loses nothing, one that does so in each round is slow.

    pointers: name -> dtype, also of numbers that are not i32. constants: also the integers that are 1, which the launcher
    makes constants. aligned: the integers that it would find to be multiples of 16. options: Triton's."""
    names = kernel.arg_names
    types = {name: pointers.get(name, "fp32" if name in ("scale", "slope") else "i32") for name in names}
    types |= dict.fromkeys(constants, "constexpr")
    multiples = [name for name in types if types[name][0] == "*" or name in aligned]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, types, values, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": warps} | options)
    if capability == 86:  # with --long
        compile_for_amd(source, {"num_warps": min(16, warps)} | options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def dump(what):
        return subprocess.run([tool, what, binary], capture_output=True, text=True, check=True).stdout

    used = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", dump("--dump-resource-usage"))
    used = {name: int(value) for name, value in used} | {"SHARED": compiled.metadata.shared}
    return used | {"LOOP": local_memory_in_loops(dump("-sass")) if used["STACK"] else 0}, compiled.asm["ptx"]
