"""What the FP4 products must answer: the sums in float64, within what fp32 accumulation may lose."""

import numpy as np
import torch
from support import spec

from expected import Tensors

EPS = 2.0**-24


def decoded(codes, scale, layout, block_size) -> np.ndarray:
    packed = codes.cpu().view(torch.uint8).contiguous().numpy()
    rows, width = packed.shape[0], packed.shape[1] * 2
    bytes_ = scale.cpu().contiguous().view(torch.uint8).numpy()
    scales = spec.collect(bytes_, layout, rows, width // block_size)
    return spec.dequantise(spec.unpack(packed), scales).astype(np.float64).reshape(rows, width)


def operands(given) -> tuple[np.ndarray, np.ndarray]:
    """``a`` (M, K) and ``b`` (N, K)."""
    layout, block = given["scale_layout"], given["block_size"]
    b = decoded(given["b"].t(), given["b_scale"], "128x4" if layout == "8x4" else layout, block)
    if "a_scale" not in given:
        return given["a"].cpu().double().numpy(), b
    return decoded(given["a"], given["a_scale"], layout, block), b


def results(given) -> Tensors:
    a, b = operands(given)
    with np.errstate(all="ignore"):
        total = torch.from_numpy((a @ b.T).astype(np.float32))
    if given["alpha"] is not None:
        total = total * given["alpha"].cpu().reshape(())
    return (total.to(given["out_dtype"] or given["a"].dtype),)


def assert_results(actual, expected, given) -> None:
    """Equal where the sums are exact in fp32; else within K roundings of the sum, and one to the output's dtype."""
    (got,), (want,) = actual, expected
    assert got.dtype == want.dtype and got.shape == want.shape, f"{got.dtype} {got.shape}"
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    a, b = operands(given)
    with np.errstate(all="ignore"):
        sizes = torch.from_numpy(np.abs(a) @ np.abs(b).T)
        bound = sizes * a.shape[1] * EPS
    if given["alpha"] is not None:
        bound = bound * given["alpha"].cpu().double().abs().reshape(())
    step = want.double().abs() * torch.finfo(want.dtype).eps + torch.finfo(want.dtype).smallest_normal
    finite = want.isfinite() & got.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], want[~finite & ~want.isnan()])
    error = (got.double() - want.double()).abs()
    wrong = finite & (error > bound + step)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums are off, first at {wrong.nonzero()[:4].tolist()}"
    )
