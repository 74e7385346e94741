"""Host functions of kernels launch nothing if an output shares memory with another tensor of the call."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.emulated import POISON, poisoned
from support.host_grids import Placed, call_apart, grids
from support.kernel_grid import BF16, FP8_TARGETS, WHAT, Case, MoeCase

from ptx_emulator.adapter import run_kernel
from torch_cute_ops.kernels.common.core.launch import ctas_if_adjacent, ctas_unless_overlapping
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import Dim, TensorArg

HOPPER = ARCHS["sm_90a"]
WIDTH, CTAS = 4, 7


class Probe:
    """Test kernel that writes ``out`` and ``sums``, and reads ``x`` and ``weight``.

    ``sums`` may be the same tensor as ``x``, or other columns of the same matrix.
    """

    config = "probe"

    def arguments(self) -> tuple:
        rows = Dim("rows")

        def strided(stride: str) -> TensorArg:
            return TensorArg("Float16", (rows, WIDTH), (Dim(stride, bits=64), 1), align=2)

        return (
            strided("x_stride"),
            strided("sums_stride"),
            None,
            TensorArg("Float32", (Dim("count"),), (1,), align=4),
            TensorArg("Uint8", (rows, WIDTH), (WIDTH, 1), align=1),
        )

    @cute.jit
    def __call__(self, x, sums, absent, weight, out, stream):
        ctas = ctas_unless_overlapping(CTAS, (out, sums, absent), (x, absent, weight), ((sums, x),))
        self.kernel(out).launch(grid=[1, ctas, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out):
        out[0, 0] = out.element_type(1)


class WrongPair(Probe):
    """Test kernel whose ``may_alias`` names a tensor that does not exist."""

    config = "wrong pair"

    @cute.jit
    def __call__(self, x, sums, absent, weight, out, stream):
        ctas = ctas_unless_overlapping(CTAS, (out,), (x,), ((sums, x),))
        self.kernel(out).launch(grid=[1, ctas, 1], block=[32, 1, 1], stream=stream)


def cells(tensor: Placed) -> list[int]:
    """Return the addresses of all bytes of all elements. An address occurs twice if two elements share it."""
    addresses = np.array(tensor.address)
    for extent, stride in zip(tensor.shape, tensor.stride, strict=True):
        addresses = np.add.outer(addresses, np.arange(extent) * stride * tensor.itemsize)
    return np.add.outer(addresses, np.arange(tensor.itemsize)).reshape(-1).tolist()


def span(tensor: Placed) -> set[int]:
    """Return the addresses of all bytes from a tensor's first element to its last element, gaps included."""
    return set(range(min(cells(tensor)), max(cells(tensor)) + 1)) if 0 not in tensor.shape else set()


def may_launch(x: Placed, sums: Placed, weight: Placed, out: Placed) -> bool:
    """Return True if a call may launch. The rule for overlaps is applied to the address of each byte."""
    if any(span(out) & span(other) for other in (x, sums, weight)) or span(sums) & span(weight):
        return False
    if len(set(cells(sums))) < len(cells(sums)):
        return False
    if cells(sums) == cells(x) or not span(sums) & span(x):
        return True
    return sums.stride[0] == x.stride[0] and not set(cells(sums)) & set(cells(x))


@st.composite
def calls(draw: st.DrawFn) -> tuple[Placed, Placed, Placed, Placed]:
    """Draw tensors that are near each other in memory, with rows that are contiguous, have gaps, or overlap."""
    rows = draw(st.integers(0, 3))
    strides = st.sampled_from([0, 2, 3, WIDTH, WIDTH + 1, 2 * WIDTH, 3 * WIDTH])
    x_stride = draw(strides)
    sums_stride = draw(st.sampled_from([x_stride, draw(strides)]))

    def address(step: int) -> int:
        return 4096 + draw(st.integers(0, 200 // step)) * step

    x = Placed(address(2), 2, (rows, WIDTH), (x_stride, 1))
    near_x = st.sampled_from([0, WIDTH, -WIDTH, 2 * WIDTH, draw(st.integers(-WIDTH, 3 * WIDTH))])
    sums = Placed(x.address + 2 * draw(near_x), 2, (rows, WIDTH), (sums_stride, 1))
    weight = Placed(address(4) + draw(st.sampled_from([0, 400])), 4, (draw(st.integers(0, 3)),), (1,))
    out = Placed(address(1) + draw(st.sampled_from([0, 800])), 1, (rows, WIDTH), (WIDTH, 1))
    return x, sums, weight, out


FAR = (Placed(8192, 4, (2,), (1,)), Placed(16384, 1, (3, WIDTH), (WIDTH, 1)))


@settings(max_examples=400, deadline=None)
@given(calls())
@example((Placed(4096, 2, (3, WIDTH), (8, 1)), Placed(4096, 2, (3, WIDTH), (8, 1)), *FAR))
@example((Placed(4096, 2, (3, WIDTH), (8, 1)), Placed(4104, 2, (3, WIDTH), (8, 1)), *FAR))
@example((Placed(4104, 2, (3, WIDTH), (8, 1)), Placed(4096, 2, (3, WIDTH), (8, 1)), *FAR))
@example((Placed(4096, 2, (3, WIDTH), (8, 1)), Placed(4102, 2, (3, WIDTH), (8, 1)), *FAR))
@example((Placed(4096, 2, (3, WIDTH), (8, 1)), Placed(4104, 2, (3, WIDTH), (12, 1)), *FAR))
@example((Placed(4096, 2, (1, WIDTH), (0, 1)), Placed(4096, 2, (1, WIDTH), (9, 1)), *FAR))
@example((Placed(4096, 2, (1, WIDTH), (0, 1)), Placed(4098, 2, (1, WIDTH), (0, 1)), *FAR))
def test_overlaps_by_the_byte(call: tuple[Placed, Placed, Placed, Placed]) -> None:
    """Check that a launch has CTAs if and only if ``may_launch``, which compares the addresses of all bytes, allows
    it."""
    x, sums, weight, out = call
    assert grids(Probe(), HOPPER, x, sums, None, weight, out) == [(1, CTAS if may_launch(*call) else 0, 1)]


class StackProbe:
    """Test kernel that reads a transposed and a row-major stack of matrices, each as a single matrix."""

    config = "stack probe"

    def arguments(self) -> tuple:
        experts, rows, columns = (Dim(name) for name in ("experts", "rows", "columns"))
        return (
            TensorArg("Uint8", (experts, columns, rows), (Dim("b_stride", bits=64), 1, columns), align=1),
            TensorArg("Uint8", (experts, rows, columns), (Dim("scale_stride", bits=64), columns, 1), align=1),
            TensorArg("Float32", (Dim("count"),), (1,), align=4),
        )

    @cute.jit
    def __call__(self, b, scale, out, stream):
        self.kernel(out).launch(grid=[1, ctas_if_adjacent(CTAS, b, scale), 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out):
        out[0] = 1.0


@pytest.mark.parametrize(
    ("experts", "b_stride", "scale_stride", "ctas"),
    [
        (3, 24, 24, CTAS),
        (3, 48, 24, 0),
        (3, 24, 48, 0),
        (2, 0, 24, 0),
        (2, 24, 24 + 2**32, 0),
        (1, 0, 7, CTAS),
    ],
)
def test_experts_apart(experts: int, b_stride: int, scale_stride: int, ctas: int) -> None:
    """Check that nothing is launched if there are gaps between the experts of a stack, and that the stride of a single
    expert does not matter."""
    b = Placed(4096, 1, (experts, 4, 6), (b_stride, 1, 4))
    scale = Placed(8192, 1, (experts, 6, 4), (scale_stride, 4, 1))
    assert grids(StackProbe(), HOPPER, b, scale, FAR[0]) == [(1, ctas, 1)]


def test_addresses_of_64_bits() -> None:
    """Check 64-bit addresses: rows that are 2^40 elements apart overlap a tensor 2^41 bytes after the first row."""
    begin = 0x7F00_0000_0000
    x = Placed(begin, 2, (3, WIDTH), (2**40, 1))
    sums = Placed(begin + 2**43, 2, (3, WIDTH), (WIDTH, 1))
    weight = Placed(begin - 64, 4, (16,), (1,))
    for out, ctas in ((begin + 2**41 + 100, 0), (begin + 2**42 + 7, 0), (begin + 2**42 + 8, CTAS)):
        placed = Placed(out, 1, (3, WIDTH), (WIDTH, 1))
        assert grids(Probe(), HOPPER, x, sums, None, weight, placed) == [(1, ctas, 1)]


def test_no_ctas_are_an_error() -> None:
    """Check that the model of a launch without CTAs raises an error, as CUDA does, and runs nothing."""
    x = torch.zeros(3, WIDTH, dtype=torch.float16)
    out = poisoned(3, WIDTH, dtype=torch.uint8)
    overlapping = torch.zeros(3, 6, dtype=torch.float16).as_strided((3, WIDTH), (2, 1))
    with pytest.raises(ValueError, match="no CTAs"):
        run_kernel(Probe(), HOPPER, x, overlapping, None, torch.zeros(2), out)
    assert (out == POISON).all()


def test_a_pair_that_is_not_there() -> None:
    """Check that a name in ``may_alias`` that is not a tensor of the kernel is an error."""
    with pytest.raises(Exception, match="may_alias"):
        grids(WrongPair(), HOPPER, *[Placed(0, 1, (), ())] * 2, None, *[Placed(0, 1, (), ())] * 2)


# Our kernels


class Call(NamedTuple):
    """A kernel with the arguments of a call.

    Attributes:
        kernel: the kernel.
        dims: extents and strides of the kernel's tensors, by name.
        numbers: number arguments of the kernel, by name.
        written: names of the tensors that the kernel writes.
        may_alias: names of two tensors that may be the same view, or None.
        unused: name of an argument that this call does not use, or None.
    """

    kernel: Any
    dims: dict[str, int]
    numbers: dict[str, float]
    written: tuple[str, ...]
    may_alias: tuple[str, str] | None = None
    unused: str | None = None

    def arguments(self) -> dict[str, Placed | float | None]:
        """Return the arguments of the call, with tensors that are far apart in memory."""
        given: dict[str, Placed | float | None] = call_apart(self.kernel, self.dims, self.numbers)._asdict()
        return given

    def may_launch(self, given: dict[str, Placed | float | None]) -> bool:
        """Return True if every launch of the call has CTAs."""
        launched = grids(self.kernel, HOPPER, *given.values())
        assert launched
        return all(0 not in grid for grid in launched)


def rows_call(what: str, target: tuple[str, str], *written: str) -> Call:
    kernel = Case(WHAT[what], (BF16, BF16), 128, target, "sm_90a").kernel
    dims = {"rows": 3, "tile_rows": 1, "row_stride": 256, "residual_stride": 256}
    alias = ("residual", "input") if what.startswith("add") else None
    return Call(kernel, dims, {"eps": 0.0, "max_ctas": 4}, ("y", "scale", *written), alias)


def dequantize_call() -> Call:
    kernel = Case(WHAT["dequantize"], (BF16, BF16), 128, ("nvfp4-g", "128x4"), "sm_90a").kernel
    return Call(kernel, {"rows": 3, "tile_rows": 1}, {"max_ctas": 4}, ("out",))


def swiglu_call() -> Call:
    kernel = MoeCase("moe_swiglu", (128, BF16, True, True, True)).kernel
    dims = {"rows": 12, "row_stride": 256, "ends": 4, "experts": 3}
    numbers = {"eps": 0.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0, "max_ctas": 4}
    return Call(kernel, dims, numbers, ("y", "scale"))


def finalize_call(tokens: int, residual: bool) -> Call:
    kernel = MoeCase("moe_finalize", (BF16, 64, 2, residual)).kernel
    dims = {"rows": 9, "tokens": tokens, "row_stride": 64, "residual_stride": 64}
    return Call(kernel, dims, {"sms": 2}, ("out",), ("out", "residual") if residual else None)


def permute_call(tokens: int) -> Call:
    kernel = MoeCase("moe_permute", (BF16, 128, 2)).kernel
    dims = {"rows": 2 * tokens, "tokens": tokens, "row_stride": 128, "kept": tokens, "kept_scales": 1, "kept_pitch": 1}
    if tokens > kernel.config.few:
        return Call(kernel, dims, {}, ("y", "scale", "workspace"))
    return Call(kernel, dims, {}, ("y", "scale"), unused="workspace")


def square_blocks_call() -> Call:
    kernel = MoeCase("fp8_square_blocks", (BF16, None)).kernel
    dims = {"experts": 2, "n": 130, "k": 192, "expert_stride": 130 * 192, "row_stride": 192}
    return Call(kernel, {**dims, "rows": 260, "scale_rows": 4, "scale_columns": 2}, {}, ("y", "scale"))


ROUTED = ("weights", "ids", "expanded_to_permuted", "permuted_to_expanded", "offsets", "counts")


def route_call(tokens: int) -> Call:
    kernel = MoeCase("moe_route", (BF16, 8, 2, True, True, 1, 1, True, False)).kernel
    numbers = {"scaling_factor": 1.0, "row_multiple": 4, "sms": 2}
    words = kernel.config.workspace_words(tokens, 4 * tokens, 2)
    dims = {"tokens": tokens, "row_stride": 8, "rows": 4 * tokens, "workspace_words": max(words, 1)}
    if words:
        return Call(kernel, dims, numbers, (*ROUTED, "workspace"))
    return Call(kernel, dims, numbers, ROUTED, unused="workspace")


def route_ids_call(tokens: int) -> Call:
    kernel = MoeCase("moe_route_ids", (8, False)).kernel
    words = kernel.config.workspace_words(8 * tokens, 4 * tokens, 2)
    dims = {"tokens": tokens, "topk": 8, "rows": 4 * tokens, "workspace_words": max(words, 1)}
    written = ROUTED[2:]
    if words:
        return Call(kernel, dims, {"row_multiple": 4, "sms": 2}, (*written, "workspace"))
    return Call(kernel, dims, {"row_multiple": 4, "sms": 2}, written, unused="workspace")


def route_dense_call() -> Call:
    kernel = MoeCase("moe_route_dense", (BF16, 8, 2, True, True, 1, 1, True, True)).kernel
    return Call(kernel, {"tokens": 5, "row_stride": 8}, {"scaling_factor": 1.0}, ("out",))


CALLS = {
    "norm": lambda: rows_call("norm-norm", ("nvfp4-g", "128x4"), "norm"),
    "add": lambda: rows_call("add-linear", ("nvfp4-g", "128x4"), "scale_linear", "residual"),
    "tensor": lambda: rows_call("silu", FP8_TARGETS[0]),
    "column": lambda: rows_call("silu", FP8_TARGETS[3]),
    "dequantize": dequantize_call,
    "swiglu": swiglu_call,
    "square_blocks": square_blocks_call,
    "finalize": lambda: finalize_call(5, residual=False),
    "finalize-residual": lambda: finalize_call(5, residual=True),
    "finalize-many": lambda: finalize_call(600, residual=True),
    "permute": lambda: permute_call(5),
    "permute-many": lambda: permute_call(200),
    "route": lambda: route_call(5),
    "route-many": lambda: route_call(70),
    "route-ids": lambda: route_ids_call(5),
    "route-ids-many": lambda: route_ids_call(70),
    "route-dense": route_dense_call,
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_overlap_nothing(name: str) -> None:
    """Check that a written tensor may be adjacent to another tensor, and must not overlap it by a single byte."""
    call = CALLS[name]()
    given = call.arguments()
    assert call.may_launch(given)
    tensors = [other for other, value in given.items() if isinstance(value, Placed) and other != call.unused]
    for output in call.written:
        for other in tensors:
            if other == output:
                continue
            at, moved = given[output], given[other]
            for address, apart in (
                (at.end, True),
                (at.end - 1, False),
                (at.address - moved.nbytes, True),
                (at.address - moved.nbytes + 1, False),
            ):
                launches = call.may_launch(given | {other: moved._replace(address=address)})
                assert launches == apart, f"{other} at {address - at.address} from {output}"
    if call.unused is not None:
        assert call.may_launch(given | {call.unused: given[call.written[-1]]})


@pytest.mark.parametrize("name", [name for name in CALLS if name in ("add", "finalize-residual", "finalize-many")])
def test_what_may_be_one_view(name: str) -> None:
    """Check that the tensors in ``may_alias`` may be the same view, and if both may be strided also different columns
    of the same matrix."""
    call = CALLS[name]()
    given = call.arguments()
    output, other = call.may_alias
    at = given[output]
    same = given[other]._replace(address=at.address, stride=at.stride)
    assert call.may_launch(given | {other: same})
    assert not call.may_launch(given | {other: same._replace(stride=(at.stride[0] + 8, 1))})
    if name == "add":
        for columns, apart in ((128, True), (120, False), (-128, True), (384, True), (376, False)):
            moved = same._replace(address=at.address + 2 * columns)
            assert call.may_launch(given | {other: moved}) == apart, columns


def test_a_residual_that_overlaps_itself() -> None:
    """Check that rows of a written residual must not overlap each other."""
    call = CALLS["add"]()
    given = call.arguments()
    for stride, fits in ((128, True), (120, False), (0, False)):
        assert call.may_launch(given | {"residual": given["residual"]._replace(stride=(stride, 1))}) == fits
