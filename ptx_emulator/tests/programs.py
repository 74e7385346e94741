"""Small PTX programs, and a function that runs them."""

import struct
from typing import Any

import numpy as np
import torch

from ptx_emulator import (
    GlobalMemory,
    Launch,
    Machine,
    parse,
)

SEEDS = range(4)


def entry(body: str, shared: int = 0, params: int = 2) -> str:
    """Return a kernel with pointers ``p0``, ``p1``, … in %rd0, %rd1, …, shared memory ``buf``, and the thread index in
    %r0."""
    names = ", ".join(f".param .u64 p{i}" for i in range(params))
    loads = "\n".join(f"ld.param.u64 %rd{i}, [p{i}];" for i in range(params))
    memory = f".shared .align 128 .b8 buf[{shared}];" if shared else ""
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.visible .entry kernel({names})
{{
    .reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<72>; .reg .b64 %rd<40>;
    {memory}
    {loads}
    mov.u32 %r0, %tid.x;
    {body}
    ret;
}}
"""


def launch(
    text: str,
    *buffers: np.ndarray,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    seed: int | None = 0,
    **kwargs: Any,
) -> list[np.ndarray]:
    """Run a kernel on copies of ``buffers``. Return the contents of the copies after the launch."""
    memory = GlobalMemory()
    addresses = [memory.allocate(f"p{i}", b.view(np.uint8)) for i, b in enumerate(buffers)]
    params = [struct.pack("<Q", address) for address in addresses]
    shape = ((grid, 1, 1), (block, 1, 1), params, (cluster, 1, 1))
    Machine(parse(text), Launch(*shape), memory, seed, **kwargs).run()
    return [memory.contents(a, b.nbytes).view(b.dtype) for a, b in zip(addresses, buffers, strict=True)]


def zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.uint32)


AT = "mul.wide.u32 %rd8, %r0, 4; add.s64 %rd9, %rd0, %rd8;"
"""Code that computes the address of this thread's word of ``p0`` in %rd9."""
SLOT = "shl.b32 %r8, %r0, 2; mov.u32 %r9, buf; add.s32 %r9, %r9, %r8;"
"""Code that computes the address of this thread's word of ``buf`` in %r9."""

HALVES = {
    "bf16": (torch.bfloat16, (8, -126, 127), [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7FC1]),
    "f16": (torch.float16, (11, -14, 15), [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x7BFF, 0x7C00, 0x7E01]),
}
"""For each 16-bit format: its dtype; its significant bits, smallest and largest exponent; and bits of special
values."""
