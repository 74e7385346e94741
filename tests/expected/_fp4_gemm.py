"""Expected results of the FP4 GEMMs: sums in float64, with the error bound of fp32 accumulation."""

import numpy as np
import torch
from support import spec

from expected import Tensors
from expected._epilogue import EPS, finished, moved, of_rows


def decoded(codes, scale, layout, block_size) -> np.ndarray:
    packed = codes.cpu().view(torch.uint8).contiguous().numpy()
    rows, width = packed.shape[0], packed.shape[1] * 2
    bytes_ = scale.cpu().contiguous().view(torch.uint8).numpy()
    scales = spec.collect(bytes_, layout, rows, width // block_size)
    return spec.dequantise(spec.unpack(packed), scales).astype(np.float64).reshape(rows, width)


def layout_of(given) -> str:
    """Return the layout of the activations' scales, or of the weight's scales if the activations have none."""
    weight = given["b_scale"] if "b_scale" in given else given["w_scale"]
    is_fp4 = "a_scale" in given and given["a_scale"].dtype.itemsize == 1
    return spec.layout_named(given["scale_layout"], given["a_scale"] if is_fp4 else weight)


def operands(given) -> tuple[np.ndarray, np.ndarray]:
    """Return the decoded operands ``a`` (M, K) and ``b`` (N, K)."""
    layout, block = layout_of(given), given["block_size"]
    b = decoded(given["b"].t(), given["b_scale"], "128x4" if layout == "8x4" else layout, block)
    if "a_scale" not in given:
        return sixteen_bit(given["a"], block), b
    return decoded(given["a"], given["a_scale"], layout, block), b


def sixteen_bit(a: torch.Tensor, block_size: int) -> np.ndarray:
    """Return 16-bit activations in float64, rounded to bfloat16 first if the weight is MXFP4, as in the GEMM."""
    return (a.cpu().bfloat16() if block_size == 32 else a.cpu()).double().numpy()


def out_dtype(given) -> torch.dtype:
    """Return the dtype of the result."""
    return given["out_dtype"] or (given["a"].dtype if given["a"].dtype.itemsize == 2 else torch.bfloat16)


def row_scale_of(given) -> np.ndarray | None:
    """Return the scales of the rows in float64, (M, 1), or None."""
    scale = given.get("row_scale")
    return None if scale is None else scale.detach().cpu().double().numpy()[:, None]


def results(given) -> Tensors:
    a, b = operands(given)
    with np.errstate(all="ignore"):
        total = finished(a @ b.T, of_rows(given["alpha"]), of_rows(given["bias"]), row_scale_of(given))
    return (torch.from_numpy(total).to(out_dtype(given)),)


def assert_results(actual, expected, given, spread: np.ndarray | float = 0.0) -> None:
    """Check that results are equal if the sums are exact in fp32. Otherwise allow K roundings of the sum, the roundings
    of the epilogue, and one rounding to the output's dtype. ``spread`` bounds the error of each activation (M, K)."""
    (got,), (want,) = actual, expected
    assert got.dtype == want.dtype and got.shape == want.shape, f"{got.dtype} {got.shape}"
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    a, b = operands(given)
    with np.errstate(all="ignore"):
        lost = (np.abs(a) * a.shape[1] * EPS + spread) @ np.abs(b).T
        terms = of_rows(given["alpha"]), of_rows(given["bias"]), row_scale_of(given)
        bound = torch.from_numpy(moved(a @ b.T, lost, *terms))
    step = want.double().abs() * torch.finfo(want.dtype).eps + torch.finfo(want.dtype).smallest_normal
    finite = want.isfinite() & got.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], want[~finite & ~want.isnan()])
    error = (got.double() - want.double()).abs()
    wrong = finite & (error > bound + step)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums are off, first at {wrong.nonzero()[:4].tolist()}"
    )
