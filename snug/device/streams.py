"""Copies between the device and the host beside compute, on side streams.

    with aside(device, to="device") as done:      # the copy begins when all that compute has issued so far is done
        weight.copy_(on_host, non_blocking=True)
    ...                                           # compute goes on meanwhile
    done.wait()                                   # what compute issues from now on follows the copy

One side stream per direction, since a device has a copy engine for each. On a CPU, and for a planner's tensors, which
are CPU tensors to torch, copies run in order and `wait` does nothing.

Rules, so that no `record_stream` is needed and the device's peak is as planned:
- Sources and destinations are allocated outside `aside`, so their memory belongs to the compute stream.
- They are referenced until `done.wait()`. If one is freed earlier, compute may reuse its memory during the copy.
- Compute neither writes a source nor touches a destination before `done.wait()`.
- Work inside allocates nothing: a side stream would get a pool of memory that compute cannot use.
- Both are contiguous and have the same dtype. Otherwise `copy_` allocates a temporary tensor inside `aside`.
- Before the host reads a copy: `done.wait()`, then synchronize the compute stream.
- Do not use `aside` while a CUDA graph is recorded.
"""

from contextlib import contextmanager

from torch import cuda

SIDES = {}  # (device, direction) -> its side stream


class Done:
    """The copies of an `aside` on a CPU, which are done. On CUDA it is an event, whose `wait` is for the current
    stream: what is issued to it from then on follows the copies, and the host does not wait. `wait` may be called
    again."""

    def wait(self):
        pass


def has_streams(device):
    return device.type == "cuda"


@contextmanager
def aside(device, to: str):
    """What is issued inside runs on a side stream, after what compute has issued so far -> Done or an event. Rules: see
    above. to: "device" or "host", where the copies go.
    """
    if not has_streams(device):
        yield Done()
        return
    side = SIDES.get((device, to))
    if side is None:
        side = SIDES[device, to] = cuda.Stream(device)
    side.wait_stream(cuda.current_stream(device))
    done = cuda.Event()
    with cuda.stream(side):
        yield done
    done.record(side)


def settle():
    """The host waits for all copies. After an error too: memory freed during a copy must not be reused before."""
    for side in SIDES.values():
        side.synchronize()
