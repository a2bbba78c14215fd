"""The device that a process computes on, and its host.

    pick     which device, and torch's switches for it        kinds      what kind of device a tensor is on
    cpu      fast products                                   cuda       shapes of a GPU; uploads; its cache
    host     tensors in host memory                           streams    copies that overlap with compute
    processes   a process's share of the work

Left out: how its memory is counted and filled (memory/), what runs on it (kernels/).
"""
