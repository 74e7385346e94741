"""Expected results of the FP4 GEMMs that quantise their activations: GEMMs over the codes that ``spec`` computes."""

import numpy as np

from expected import Tensors, _fp4_gemm, quantised

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor b_scale, Tensor? global_scale=None, Tensor? alpha=None, Tensor? bias=None, "
    "ScalarType? out_dtype=None, int block_size=16, str? scale_format=None, str? scale_layout=None, "
    "str backend='auto', bool static_weight=False, Tensor? prefetch=None"
)


def schemas(op: str, more: str = "") -> tuple[str, str]:
    """Return ``SCHEMA`` and ``OUT_SCHEMA`` of ``op``, the schemas that are promised to users. ``more`` contains the
    arguments after those that all ops share."""
    arguments = _ARGUMENTS + more
    return f"cute::{op}({arguments}) -> Tensor", f"cute::{op}.out({arguments}, *, Tensor(a!) out) -> ()"


def multiplied(value: np.ndarray, given) -> dict:
    """Return the arguments of the equivalent ``mm_fp4`` call for these fp32 rows (M, K)."""
    given = {**given, "scale_layout": _fp4_gemm.layout_of(given)}
    codes, scale = quantised(value, value.shape[:1], given)
    return {**given, "a": codes, "a_scale": scale, "out_dtype": _fp4_gemm.out_dtype(given)}


def decoded(value: np.ndarray, given) -> np.ndarray:
    """Quantise these fp32 rows (M, K) and decode them again."""
    return _fp4_gemm.operands(multiplied(value, given))[0]


def results(value: np.ndarray, given) -> Tensors:
    return _fp4_gemm.results(multiplied(value, given))
