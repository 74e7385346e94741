"""FP4 block formats: NVFP4 and MXFP4.

An element is an e2m1 number (OCP MX v1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6, or the negative of one of them. Two elements
share a byte, with element 0 in the low nibble. Each block of elements shares one scale: e4m3 for 16 elements (NVFP4),
ue8m0 for 32 elements (MXFP4).
"""

import math
import warnings
from dataclasses import dataclass
from typing import Final

import torch

E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
E4M3_NAN: Final = 0x7F
UE8M0_NAN: Final = 0xFF
NVFP4_MAX: Final = E4M3_MAX * E2M1_MAX
"""Largest magnitude of an NVFP4 element times its block scale."""
FOUR_OVER_SIX: Final = 1.5
"""Ratio of the larger to the smaller scale between which "4 over 6" chooses. With the larger scale, the block's amax is
encoded as 4 instead of 6."""
FOUR_OVER_SIX_MAX: Final = 256 * E2M1_MAX
"""Largest magnitude of an element times its smaller block scale with "4 over 6". The smaller scale is at most 256, so
the larger scale is at most 384, which e4m3 represents."""
SMALLEST_ROW_SCALE: Final = 2.0**-126
"""Smallest row scale of per-token NVFP4 other than zero: the smallest normal number of fp32."""
EXTREME_ROW_SCALE: Final = 2.0**60
EXTREME_ROW_POWER: Final = 2.0**64
"""Rows whose scale is below 1 / ``EXTREME_ROW_SCALE`` are multiplied by ``EXTREME_ROW_POWER`` before they are
quantised, and rows whose scale is above ``EXTREME_ROW_SCALE`` are divided by ``EXTREME_ROW_POWER``. The factor of a
block, 1 / (row scale · block scale), is then finite in fp32."""
UE8M0_BIAS: Final = 127


@dataclass(frozen=True)
class FP4Format:
    """Block format of FP4 elements.

    Attributes:
        name: ``"nvfp4"`` or ``"mxfp4"``.
        block_size: number of elements that share a scale.
        scale_format: ``"e4m3"`` or ``"ue8m0"``, as in the ops' ``scale_format`` argument.
        scale_dtype: dtype of the scale tensor that ops return.
        has_global_scale: True if a tensor may have a global scale, one fp32 number that multiplies it before it is
            encoded.
    """

    name: str
    block_size: int
    scale_format: str
    scale_dtype: torch.dtype
    has_global_scale: bool

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that ops accept for a scale argument."""
        return (self.scale_dtype,) if self.scale_format == "e4m3" else (self.scale_dtype, torch.float8_e8m0fnu)

    @property
    def width_multiple(self) -> int:
        """Number that must divide the length of a row: the block size."""
        return self.block_size

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a GEMM multiplies 16-bit activations with a weight of this format.

        MXFP4 weights need bfloat16, because their block scales exceed float16's range. float16 activations are then
        rounded to the nearest bfloat16, ties to even.
        """
        return torch.bfloat16 if self.scale_format == "ue8m0" else dtype


NVFP4: Final = FP4Format("nvfp4", 16, "e4m3", torch.float8_e4m3fn, has_global_scale=True)
MXFP4: Final = FP4Format("mxfp4", 32, "ue8m0", torch.uint8, has_global_scale=False)

_BY_ARGUMENTS: Final = {
    (fmt.block_size, scale_format): fmt for fmt in (NVFP4, MXFP4) for scale_format in (None, fmt.scale_format)
}


def resolve_fp4_format(block_size: int, scale_format: str | None) -> FP4Format:
    """Return the format for an op's arguments. If ``scale_format`` is None, the block size determines it.

    Raises:
        ValueError: for any pair other than (16, e4m3) and (32, ue8m0).
    """
    fmt = _BY_ARGUMENTS.get((block_size, scale_format))
    if fmt is None:
        raise ValueError(
            f"block_size={block_size!r} with scale_format={scale_format!r} is no FP4 format; "
            "use block_size=16, scale_format='e4m3' (NVFP4) or block_size=32, scale_format='ue8m0' (MXFP4)"
        )
    return fmt


def nvfp4_global_scale(amax: torch.Tensor, four_over_six: bool = False) -> torch.Tensor:
    """Compute a tensor's global scale for NVFP4: ``448 · 6 / amax``, which maps its largest magnitude to NVFP4's
    maximum.

    The computation runs on the device of ``amax``, without a synchronisation.

    Args:
        amax: one element of any floating dtype, such as ``x.abs().amax()``.
        four_over_six: True for ``256 · 6 / amax``, for ``fp4_quantize_four_over_six``: e4m3 then also represents
            the scale of the tensor's largest block times 1.5.

    Returns:
        (1,) float32, always finite; 1 if ``amax`` is zero or not finite. If ``amax`` is on a CPU and is negative or not
            finite, the function warns. On a GPU it does not, because a check would wait for the result.

    Raises:
        TypeError: if ``amax`` is not a tensor.
        ValueError: if ``amax`` does not contain exactly one element.
    """
    if not isinstance(amax, torch.Tensor):
        raise TypeError(f"amax is {amax!r}, a {type(amax).__name__}; expected a tensor, such as x.abs().amax()")
    if amax.numel() != 1:
        raise ValueError(f"got amax with shape {tuple(amax.shape)}; expected one element, such as x.abs().amax()")
    amax = amax.detach().float().reshape(1)
    if amax.is_cpu and _has_value(amax) and not 0 <= amax.item() < float("inf"):
        warnings.warn(
            f"nvfp4_global_scale: amax is {amax.item()}; expected a finite number, 0 or more. The global scale is 1; "
            "look for NaN or infinity in the tensor",
            stacklevel=2,
        )
    # Use ``full_like``: to divide a Python number by a tensor, torch multiplies by the reciprocal, which rounds twice.
    most = FOUR_OVER_SIX_MAX if four_over_six else NVFP4_MAX
    scale = (torch.full_like(amax, most) / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def _has_value(tensor: torch.Tensor) -> bool:
    """Return True if Python can read the tensor's element. It cannot while torch compiles or transforms the code."""
    return type(tensor) is torch.Tensor and not torch.compiler.is_compiling() and not _is_transformed(tensor)


# This private function may be missing in some versions of torch. Then report that no element can be read.
_is_transformed = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: True)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes, uint8 (..., K), into bytes (..., K/2)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes (..., K/2) into 4-bit codes, uint8 (..., K)."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_e2m1(value: torch.Tensor) -> torch.Tensor:
    """Encode fp32 values as e2m1 codes, uint8. Round to nearest even, saturate, and preserve the sign of zero.

    Neighbouring e2m1 numbers differ by 0.5 below 2, by 1 from 2 to 4, and by 2 above 4.
    """
    magnitude = value.abs().clamp(max=E2M1_MAX)
    below_2 = (magnitude * 2).round()
    below_4 = magnitude.round() + 2
    above_4 = (magnitude / 2).round() + 4
    code = torch.where(magnitude < 2, below_2, torch.where(magnitude < 4, below_4, above_4))
    return code.to(torch.uint8) | (torch.signbit(value).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Decode e2m1 codes (uint8, 0..15) to fp32."""
    # Shift the bits of a code into the exponent and fraction fields of a float32, which is then the code's value times
    # 2^-126. A lookup table would break the capture of CUDA graphs.
    codes = codes.to(torch.int32)
    return (((codes & 7) << 22) | ((codes & 8) << 28)).view(torch.float32) * 2.0**126


def encode_e4m3(value: torch.Tensor) -> torch.Tensor:
    """Encode fp32 values as ``float8_e4m3fn``. Round to nearest even, and saturate at ±448. Any NaN becomes 0x7F."""
    return torch.where(value.isnan(), torch.nan, value.clamp(-E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)


def decode_ue8m0(byte: torch.Tensor) -> torch.Tensor:
    """Decode ue8m0 bytes (uint8) to fp32: ``2^(byte - 127)``, or NaN for the byte 255."""
    # The byte is the exponent field of an fp32 number, except for 2^-127, which is subnormal in fp32.
    bits = torch.where(byte == 0, 0x00400000, byte.to(torch.int32) << 23)
    return torch.where(byte == UE8M0_NAN, torch.nan, bits.to(torch.int32).view(torch.float32))


def encode_ue8m0(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the ue8m0 bytes, uint8, of the scales of blocks with these magnitudes: ``2^ceil(log2(amax / largest))``,
    at least 2^-127, or NaN if ``amax`` is not finite.

    Args:
        amax: fp32 largest magnitudes of the blocks, 0 or more.
        largest: largest number of the element format. Its significand has few bits.
    """
    # Compute the exponent from the bits: with largest = f · 2^e and 1 ≤ f < 2, subtract e from amax's exponent, and add
    # 1 if amax's significand exceeds f. A subnormal amax gets the smallest scale.
    fraction, exponent = math.frexp(largest)
    carry = int((2 - 2 * fraction) * 2**23) - 1
    byte = (((amax.view(torch.int32) + carry) >> 23) - (exponent - 1)).clamp(min=0).to(torch.uint8)
    return torch.where(amax.isfinite(), byte, UE8M0_NAN)


def decode_scale(scale: torch.Tensor, fmt: FP4Format) -> torch.Tensor:
    """Decode block scales of format ``fmt`` to fp32."""
    return decode_ue8m0(scale) if fmt == MXFP4 else scale.float()
