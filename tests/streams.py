"""CUDA's streams and pinned memory on a CPU, for tests of copies that run beside compute.

    with fake_streams() as races:      # snug/device/streams.py uses streams that only keep books
        run()                          # raises Race where a GPU might read or write too early
    races.log                          # [Op], in the order of issue

Every op runs at once, in the order of issue, so results are right. Races checks the order that a GPU must keep: each
stream has a vector clock (PyTorch's own, of its CUDA sanitizer), and two accesses to the same bytes, one of them a write,
must be ordered by a stream, an event or a wait of the host. Tensors that the host ledger counts are on the host, all
others on the device. It sees PyTorch's ops only, so it misses `tolist`, `numpy` and kernels of other libraries.

On a GPU PyTorch's sanitizer itself checks a run: TORCH_CUDA_SANITIZER=1 python grpo.py ...
It compares addresses where tensors begin, so it is blind to a slab within a tensor, and to what the host reads.
"""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.cuda._sanitizer import StreamSynchronizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snug.device.host import HOST

COMPUTE = 0


class Race(AssertionError):
    """Two accesses that a GPU may make in either order."""


class Op(NamedTuple):
    name: str
    stream: int | None  # 0 is compute, None the host
    reads: list  # keys of storages
    writes: list


class Access(NamedTuple):
    start: int  # bytes of a storage, [start, end)
    end: int
    writes: bool
    stream: int
    name: str
    number: int  # of the op

    def conflicts(self, other):
        return (self.writes or other.writes) and self.start < other.end and other.start < self.end

    def __str__(self):
        where = "the host's" if self.stream is None else f"stream {self.stream}'s"
        return f"{where} {self.name} {'writing' if self.writes else 'reading'}"


class Races(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.clocks, self.current, self.streams = StreamSynchronizations(), COMPUTE, 0
        self.log, self.events = [], 0
        self.accesses = {}  # key of a living storage -> its Accesses
        self.freed = []  # Accesses to storages whose memory compute may get with its next tensor
        self.alive = {}  # key -> (weak reference, whether it is on the host)
        self.cuda = SimpleNamespace(Stream=lambda device=None: Stream(self), Event=lambda: Event(self))
        self.cuda.current_stream = lambda device=None: Stream(self, self.current)
        self.cuda.stream = self.on_stream

    @contextmanager
    def on_stream(self, stream):
        before, self.current = self.current, stream.id
        yield
        self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        given, name = tensors((args, kwargs)), func._schema.name.removeprefix("aten::")
        keys = {key_of(x) for x in given}
        made = [x for x in tensors(result) if key_of(x) not in keys]
        for x in given:
            self.follow(x)
        read = [] if name.startswith("new_") or name.endswith("_like") else given  # these read only a shape
        by_host = bool(read) and all(map(self.on_host, read))
        for x in made:
            self.follow(x, is_made=True, on_host=by_host)
        if func.is_view:
            return result
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [x for a, value in arguments if a.is_write for x in tensors(value)] + tensors(kwargs.get("out"))
        self.ran(name, read, written + made)  # a new tensor is compute's from its allocation on
        blocks = name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if name == "_local_scalar_dense" or (blocks and len({self.on_host(x) for x in given}) == 2):
            self.clocks.all_streams_wait_for_stream(self.current)
        return result

    def ran(self, name, read, written):
        """Check an op's accesses and remember them."""
        accessed = [(x, False) for x in read] + [(x, True) for x in written]
        stream = None if accessed and all(self.on_host(x) for x, _ in accessed) else self.current
        self.log.append(Op(name, stream, [key_of(x) for x in read], [key_of(x) for x in written]))
        if stream is not None:
            self.clocks.update_seq_num(stream, len(self.log))
        for x, writes in accessed:
            now = Access(*extent(x), writes, stream, name, len(self.log))
            earlier = self.accesses.setdefault(key_of(x), [])
            for access in earlier:
                if now.conflicts(access) and not self.is_over(access, stream):
                    raise Race(f"{now} while {access} may be under way, on {tuple(x.shape)}")
            if stream is not None:  # what the host does is over when it goes on. Who follows `now` follows its like.
                earlier[:] = [access for access in earlier if access[:4] != now[:4]] + [now]

    def is_over(self, access, stream):
        """Is an access over when what is now issued on a stream runs? None: is it now, for the host?"""
        if stream is None:
            return access.number <= self.clocks.host_sync_state.get(access.stream, 0)
        return self.clocks.is_ordered_after(stream, access.number, access.stream)

    def on_host(self, tensor):
        return self.alive[key_of(tensor)][1]

    def follow(self, tensor, is_made=False, on_host=False):
        key, storage = key_of(tensor), tensor.untyped_storage()
        if key in self.alive:
            return
        on_host = on_host or HOST.making or key in HOST.sizes
        self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), on_host
        if is_made and not on_host:
            if self.current != COMPUTE:
                raise Race(f"{tuple(tensor.shape)} is allocated on a side stream")
            for access in self.freed:
                if not self.is_over(access, COMPUTE):
                    raise Race(f"compute gets memory in which {access} may be under way")
            self.freed = []

    def forget(self, key):
        accesses, (_, on_host) = self.accesses.pop(key, []), self.alive.pop(key)
        if not on_host:  # pinned memory waits for copies by itself
            self.freed += accesses


class Stream:
    def __init__(self, races, number=None):
        if number is None:
            races.streams += 1
            races.clocks.create_stream(races.streams)
        self.races, self.id = races, races.streams if number is None else number

    def wait_stream(self, other):
        event = Event(self.races)
        event.record(other)
        self.races.clocks.stream_wait_for_event(self.id, event.id)

    def synchronize(self):
        self.races.clocks.all_streams_wait_for_stream(self.id)


class Event:
    def __init__(self, races):
        races.events += 1
        self.races, self.id, self.recorded = races, races.events, False
        races.clocks.create_event(self.id)

    def record(self, stream):
        self.recorded = True
        self.races.clocks.record_state(self.id, stream.id)

    def wait(self):
        if self.recorded:
            self.races.clocks.stream_wait_for_event(self.races.current, self.id)


@contextmanager
def fake_streams():
    """-> Races. snug/device/streams.py inside takes the CPU for a device with streams. Skips the test on CUDA, where kernels
    run that the books do not see."""
    if torch.cuda.is_available():
        pytest.skip("the books know PyTorch's ops alone; on CUDA kernels run, too")
    races = Races()
    with patch.multiple("snug.device.streams", cuda=races.cuda, has_streams=lambda device: True, SIDES={}), races:
        yield races


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def key_of(tensor):
    return id(tensor.untyped_storage())


def extent(tensor):
    """The bytes of its storage that a tensor may touch, [start, end)."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


class Cudart:
    """In place of torch.cuda.cudart(): keeps books of the pages that are pinned.

    Raises if pages are unpinned that are not pinned, or no longer there.
    """

    def __init__(self, error=0):
        self.pinned, self.calls, self.error = {}, [], error  # pinned: address -> bytes

    def cudaHostRegister(self, address, size, flags):
        self.calls.append(("register", address))
        if self.error == 0:
            assert address not in self.pinned and is_mapped(address, size)
            self.pinned[address] = size
        return self.error

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        assert is_mapped(address, self.pinned.pop(address)), "the memory went before it was unpinned"
        return 0


def is_mapped(address, size):
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= address and address + size <= end for start, end in ranges)


def flags_of(address):
    """-> the kernel's flags of the mapping that holds this address, such as ["rd", "wr", "dc"]."""
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first, *rest = line.split()
            if not first.endswith(":"):
                start, end = (int(number, 16) for number in first.split("-"))
                inside = start <= address < end
            elif inside and first == "VmFlags:":
                return rest


class Pinnable:
    """What new_on_host asks of a tensor on CUDA."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cuda")


@contextmanager
def fake_pinning(error=0):
    """-> Cudart. Inside, `new_on_host(Pinnable(...), keep=True)` pins with it."""
    cudart = Cudart(error)

    def check_error(code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def synchronize():
        cudart.calls.append(("synchronize", None))

    with patch.multiple("torch.cuda", cudart=lambda: cudart, check_error=check_error, synchronize=synchronize):
        yield cudart
