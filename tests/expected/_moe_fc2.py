"""Expected results of the GEMMs that sum over experts: sums in float64, with the error bound of fp32 arithmetic."""

import numpy as np
import torch

from expected import Tensors
from expected._epilogue import EPS
from expected._fp4_gemm import decoded, layout_of, out_dtype, sixteen_bit


def operands(given) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the decoded ``a`` (M, E, I) and ``w`` (N, E, I), and ``alpha`` (M, E)."""
    layout, block = layout_of(given), given["block_size"]
    alpha = given["alpha"].cpu().numpy()
    w = decoded(given["w"].mT, given["w_scale"], "128x4" if layout == "8x4" else layout, block)
    a = decoded(given["a"], given["a_scale"], layout, block) if "a_scale" in given else sixteen_bit(given["a"], block)
    experts = alpha.shape[1]
    width = w.shape[1] // experts
    return a.reshape(len(a), experts, width), w.reshape(len(w), experts, width), alpha


def by_expert(given):
    """Yield for each expert: the indices of the rows whose factor is not 0, the factors (rows, 1), the expert's columns
    of ``a`` and ``w``, and the expert's bias in float32 (0 without a bias)."""
    a, w, alpha = operands(given)
    biases = np.zeros((alpha.shape[1], 1), np.float32)
    if given["bias"] is not None:
        biases = given["bias"].detach().cpu().float().numpy()
    for expert, bias in enumerate(biases):
        rows = np.flatnonzero(alpha[:, expert] != 0)
        yield rows, alpha[rows, expert, None], a[rows, expert], w[:, expert], bias


def results(given) -> Tensors:
    """Compute the results with a rounding to float32 after each step: an expert's sum, the addition of its bias, the
    product with the factor, the total."""
    total = np.zeros((len(given["a"]), given["w"].shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for rows, factor, a, w, bias in by_expert(given):
            total[rows] += factor * ((a @ w.T).astype(np.float32) + bias)
    return (torch.from_numpy(total).to(out_dtype(given)),)


def lost(given) -> np.ndarray:
    """Return the error bound of the results (M, N) for fp32 arithmetic in any order, relative to the sum of all
    magnitudes: one rounding for each term of an expert's sum (including its bias), one for the product with the factor,
    and one for each expert that is added."""
    shape = len(given["a"]), given["w"].shape[1]
    sizes, roundings = np.zeros(shape), np.zeros((len(given["a"]), 1))
    with np.errstate(all="ignore"):
        for rows, factor, a, w, bias in by_expert(given):
            sizes[rows] += np.abs(factor.astype(np.float64)) * (np.abs(a) @ np.abs(w).T + np.abs(bias))
            roundings[rows] += 1
    return sizes * (roundings + given["w"].shape[0] * 2 // given["alpha"].shape[1] + 2) * EPS


def assert_results(actual, expected, given) -> None:
    """Check that NaN and infinities are equal, and that other results are within the error bound plus one rounding to
    the dtype."""
    (got,), (want,) = actual, expected
    assert got.dtype == want.dtype and got.shape == want.shape, f"{got.dtype} {got.shape}"
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite() & got.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], want[~finite & ~want.isnan()])
    step = want.double().abs() * torch.finfo(want.dtype).eps
    # Subnormal results may differ in the last bit.
    step += torch.finfo(want.dtype).smallest_normal * torch.finfo(want.dtype).eps * (want != 0)
    # A row without experts must be exactly zero.
    allowed = torch.where((given["alpha"].cpu() != 0).any(1, keepdim=True), torch.from_numpy(lost(given)) + step, 0.0)
    wrong = finite & ((got.double() - want.double()).abs() > allowed)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} sums are off, first at {wrong.nonzero()[:4].tolist()}"
    )
