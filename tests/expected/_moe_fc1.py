"""Expected results of the expert GEMMs with a gate: sums in float64, the gate in fp32, quantisation by the
specification."""

import numpy as np
import torch
from support import spec

from expected import Tensors, gated, quantised
from expected._epilogue import EPS
from expected._fp4_gemm import decoded, layout_of, sixteen_bit
from torch_cute_ops.formats import resolve_fp4_format, resolve_scale_layout
from torch_cute_ops.testing import assert_fp4_close


def operands(given) -> tuple[np.ndarray, np.ndarray]:
    """Return the decoded operands ``a`` (M, H) and ``w`` (E, 2·I, H)."""
    layout, block = layout_of(given), given["block_size"]
    experts, _, lines = given["w"].shape
    w = decoded(given["w"].mT.flatten(0, 1), given["w_scale"], "128x4" if layout == "8x4" else layout, block)
    a = decoded(given["a"], given["a_scale"], layout, block) if "a_scale" in given else sixteen_bit(given["a"], block)
    return a, w.reshape(experts, lines, -1)


def factors(given) -> np.ndarray:
    """Return the factor ``alpha`` of each row of the weight, (E, 2·I), in float64."""
    experts, _, lines = given["w"].shape
    if given["alpha"] is None:
        return np.ones((experts, lines))
    alpha = given["alpha"].detach().cpu().double().numpy().reshape(experts, -1)
    return np.repeat(alpha, lines // alpha.shape[1], axis=1)


def by_expert(given):
    """Yield for each expert: the indices of its routed rows, their gate and up values in float32, and the error bounds
    of these values. A bound allows one rounding per term of the sum, and two more roundings."""
    a, w = operands(given)
    routing, factor = given["routing"].cpu().numpy(), factors(given)
    bias = None if given["bias"] is None else given["bias"].detach().cpu().float().numpy()
    for expert, weight in enumerate(w):
        rows = np.flatnonzero(routing[:, expert] != 0)
        total = (a[rows] @ weight.T).astype(np.float32)
        lost = (np.abs(a[rows]) @ np.abs(weight).T) * (a.shape[1] + 1) * EPS
        if given.get("row_scale") is not None:
            by_row = given["row_scale"].detach().cpu().double().numpy()[rows, None]
            total, lost = (total * by_row).astype(np.float32), lost * np.abs(by_row) + np.abs(total * by_row) * EPS
        total, lost = (total * factor[expert]).astype(np.float32), lost * np.abs(factor[expert])
        if bias is not None:
            total = total + bias[expert]
            lost = lost + np.abs(total) * EPS
        yield rows, total, lost


def values(given) -> np.ndarray:
    """Return the results of the gate (M, E, I) in float32, with zeros for pairs that are not routed."""
    experts, _, lines = given["w"].shape
    value = np.zeros((len(given["a"]), experts, lines // 2), np.float32)
    with np.errstate(all="ignore"):
        for expert, (rows, both, _) in enumerate(by_expert(given)):
            value[rows, expert] = gated(both, given)
    return value


def results(given) -> Tensors:
    value = values(given)
    if "a_scale" not in given:
        return (torch.from_numpy(value).flatten(1).to(given["a"].dtype),)
    scale = given["global_scale"]
    encode = [None] * value.shape[1] if scale is None else scale.detach().cpu().reshape(-1).expand(value.shape[1])
    linear = {"block_size": given["block_size"], "scale_layout": "linear"}
    parts = [
        quantised(value[:, expert], value.shape[:1], linear | {"global_scale": encode[expert]})
        for expert in range(value.shape[1])
    ]
    codes, scales = (torch.cat([part[i].view(torch.uint8) for part in parts], 1) for i in range(2))
    # Treat the scales of unrouted pairs as zero, because the op does not write them. The op writes zeros to padding.
    routed = given["routing"].cpu() != 0
    scales = scales * routed.repeat_interleave(scales.shape[1] // routed.shape[1], 1)
    arranged = torch.from_numpy(spec.arrange(scales.numpy(), layout_of(given)))
    return codes, arranged.view(parts[0][1].dtype)


def assert_results(actual, expected, given) -> None:
    """Check FP4 blocks as for any op that gates and quantises. 16-bit results may be off by the error of fp32 sums, the
    gate and one rounding."""
    if len(expected) == 2:
        fmt = resolve_fp4_format(given["block_size"], given["scale_format"])
        y, scale = (got.to(want.device) for got, want in zip(actual, expected, strict=True))
        assert_fp4_close((y, scale), expected, fmt, resolve_scale_layout(layout_of(given)))
        return
    (got,), (want,) = actual, expected
    assert got.dtype == want.dtype and got.shape == want.shape, f"{got.dtype} {got.shape}"
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite() & got.isfinite()
    assert torch.equal(got[~finite & ~got.isnan()], want[~finite & ~want.isnan()])
    step = want.double().abs() * torch.finfo(want.dtype).eps + torch.finfo(want.dtype).smallest_normal
    wrong = finite & ((got.double() - want.double()).abs() > torch.from_numpy(moved(given)).flatten(1) + step)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are off, first at {wrong.nonzero()[:4].tolist()}"
    )


def moved(given) -> np.ndarray:
    """Return the error bound of the gate's results (M, E, I). The slope of a gate is at most 1.13 (the slope of GELU),
    and its exponential is computed in fp32."""
    experts, _, lines = given["w"].shape
    off = np.zeros((len(given["a"]), experts, lines // 2))
    with np.errstate(all="ignore"):
        for expert, (rows, both, lost) in enumerate(by_expert(given)):
            gate, up = np.abs(np.split(both.astype(np.float64), 2, 1))
            up = up + abs(given["swiglu_beta"])
            of_gate, of_up = np.split(lost, 2, 1)
            off[rows, expert] = 1.13 * of_gate * (up + of_up) + gate * of_up + gate * up * 2.0**-17
    return np.nan_to_num(off, posinf=np.inf)


def rows_alone(given, outputs):
    """Yield calls with a single row, and the row of ``outputs`` that each should return."""
    m, block, layout = len(given["a"]), given["block_size"], layout_of(given)
    for row in {0, m // 3, m - 1} if m else ():
        alone = given | {"a": given["a"][row : row + 1], "routing": given["routing"][row : row + 1]}
        want = [outputs[0][row : row + 1]]
        if "a_scale" in given:
            hidden = 2 * given["a"].shape[1]
            if given.get("row_scale") is not None:
                alone["row_scale"] = given["row_scale"][row : row + 1]
            alone["a_scale"] = scales_of(given["a_scale"], layout, m, hidden // block, row)
            want.append(scales_of(outputs[1], layout, m, 2 * outputs[0].shape[1] // block, row))
        yield alone, want


def scales_of(scale: torch.Tensor, layout: str, rows: int, blocks: int, row: int) -> torch.Tensor:
    """Return the scales of one row of a matrix, in the shape that they have for this row alone."""
    linear = spec.collect(scale.cpu().contiguous().view(torch.uint8).numpy(), layout, rows, blocks)
    arranged = torch.from_numpy(np.ascontiguousarray(spec.arrange(linear[row : row + 1], layout)))
    return arranged.to(scale.device).view(scale.dtype)
