"""NumPy models of the instructions in ``kernels/common/core/ptx.py`` that the FP4 conversions use.

With ``on_arrays``, device code that uses only these instructions and Python operators runs on NumPy arrays. An
instruction without a model raises an exception.
"""

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from ptx_emulator.values import fma_f32
from support import spec


def float32(value) -> np.ndarray:
    """Round to fp32 (nearest even), as the DSL's ``Float32`` rounds a Python number."""
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(np.float32)


def uint32(value) -> np.ndarray:
    return np.asarray(value).astype(np.uint32)


def _halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)


def _word(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _is_finite_or_infinite(value: np.ndarray) -> np.ndarray:
    assert not np.isnan(value).any(), "no model for NaN here"
    return value


class Ptx:
    """Models of the PTX instructions, with the same names as the functions of the module.

    PTX does not specify the rounding of ``rcp_approx``, so its model adds an error of ``reciprocal_error`` ulps.
    """

    def __init__(self, reciprocal_error: int = 0) -> None:
        self.reciprocal_error = reciprocal_error

    @staticmethod
    def mul_rn(a, b) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return float32(a) * float32(b)

    @staticmethod
    def fma_rn(a, b, c) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            return fma_f32(float32(a), float32(b), float32(c))

    def rcp_approx(self, a) -> np.ndarray:
        with np.errstate(divide="ignore"):
            exact = (1 / float32(a).astype(np.float64)).astype(np.float32)
        moved = (exact.view(np.int32) + self.reciprocal_error).astype(np.int32).view(np.float32)
        return np.where(np.isfinite(exact), moved, exact)

    @staticmethod
    def f16x2_toward_zero(low, high) -> np.ndarray:
        """Model ``cvt.rz``: round toward zero, so that too large numbers become fp16's largest finite number."""

        def truncate(value: np.ndarray) -> np.ndarray:
            magnitude = np.abs(_is_finite_or_infinite(value).astype(np.float64))
            _, exponent = np.frexp(magnitude)
            step = np.exp2(np.maximum(exponent - 11, -24).astype(np.float64))
            cut = np.minimum(np.floor(magnitude / step) * step, 65504.0)
            half = np.copysign(cut, value).astype(np.float16)
            assert (np.abs(half).astype(np.float64) == cut).all()
            return half.view(np.uint16)

        return _word(truncate(float32(low)), truncate(float32(high)))

    @staticmethod
    def min_abs_f16x2(a, limit: int) -> np.ndarray:
        def clamp(half: np.ndarray, most: int) -> np.ndarray:
            value = _is_finite_or_infinite((half & np.uint16(0x7FFF)).view(np.float16))
            return np.minimum(value, np.uint16(most).view(np.float16)).view(np.uint16)

        low, high = _halves(uint32(a))
        return _word(clamp(low, limit & 0xFFFF), clamp(high, limit >> 16))

    @staticmethod
    def prmt(a, b, selector: int) -> np.ndarray:
        result = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b)), np.uint32)
        for i in range(4):
            pick = selector >> (4 * i) & 0xF
            assert pick < 8, "no model for sign replication"
            byte = (uint32(b if pick >= 4 else a) >> np.uint32(8 * (pick % 4))) & np.uint32(0xFF)
            result |= byte << np.uint32(8 * i)
        return result

    @staticmethod
    def select_bits(mask, a, b) -> np.ndarray:
        return (uint32(mask) & uint32(a)) | (~uint32(mask) & uint32(b))

    @staticmethod
    def select(condition, a, b) -> np.ndarray:
        return np.where(condition, a, b)

    @staticmethod
    def bits_of(value) -> np.ndarray:
        return float32(value).view(np.uint32)

    @staticmethod
    def float_of(bits) -> np.ndarray:
        return uint32(bits).view(np.float32)

    @staticmethod
    def div_rn(a, b) -> np.ndarray:
        with np.errstate(all="ignore"):
            return float32(a) / float32(b)

    @staticmethod
    def e4m3_of(value) -> np.ndarray:
        """Convert to e4m3 numbers that are non-negative or NaN, such as an amax."""
        assert not (float32(value) < 0).any()
        return spec.e4m3(float32(value)).astype(np.uint32)

    @staticmethod
    def float_of_e4m3(byte) -> np.ndarray:
        return spec.scale_value(uint32(byte), "e4m3")


def on_arrays(monkeypatch: pytest.MonkeyPatch, module: ModuleType, ptx: Ptx) -> None:
    """Replace the PTX functions in the namespace of ``module`` by their models, so that its functions compute on NumPy
    arrays."""
    models = {
        "ptx": ptx,
        "Float32": float32,
        "Uint32": uint32,
        "Int32": lambda value: np.asarray(value).astype(np.int32),
        "const_expr": bool,
        "cutlass": SimpleNamespace(max=np.maximum, min=np.minimum),
    }
    for name, model in models.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, model)
