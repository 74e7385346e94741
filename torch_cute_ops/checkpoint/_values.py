"""Checks of FP8 elements and of scales in checkpoints.

For speed, each check reads a tensor once or twice, and copies it only if the check fails.
"""

from typing import Final

import torch
from torch import Tensor

_NAN: Final = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0xFF}
"""Byte that means NaN in block scales of each dtype; e8m0 scales are stored as uint8. All larger bytes have the sign
bit set."""


POWERS: Final = (torch.float8_e8m0fnu, torch.uint8)
"""Dtypes of scales that are powers of two (e8m0)."""


def check_scales(described: str, scale: Tensor) -> None:
    """Check that no block scale (e4m3 or e8m0) is NaN or negative. Minus zero is an error too, because no producer
    writes it.

    Args:
        described: tensor name and file, for messages.
        scale: block scales on the CPU; e8m0 as uint8.

    Raises:
        ValueError: if a scale is bad; the message names the first.
    """
    codes, nan = scale.view(torch.uint8), _NAN[scale.dtype]
    if codes.numel() and codes.amax() >= nan:
        range_ = "from 0 to 448" if scale.dtype == torch.float8_e4m3fn else "of 8 exponent bits, except 0xFF (NaN)"
        _refuse(described, codes, codes >= nan, f"block scales {range_}")


def check_factors(described: str, factors: Tensor, *, is_zero_allowed: bool) -> None:
    """Check that float scales are finite and positive. If ``is_zero_allowed``, they may also be 0.

    Raises:
        ValueError: if a value is bad; the message shows the first.
    """
    bad = ~(factors.isfinite() & ((factors >= 0) if is_zero_allowed else (factors > 0)))
    if bad.any():
        raise ValueError(f"{described} is {factors[bad][0].item()}; expected a positive number")


def check_zeros(described: str, factors: Tensor, weight: Tensor) -> None:
    """Check that all elements with a scale of 0 are 0 themselves. Otherwise the scale would erase elements, which no
    producer intends.

    Args:
        described: name and file of the scales, for messages.
        factors: scales with one element, (N,) or (N, 1), or (⌈N/128⌉, ⌈K/128⌉); at least one is zero.
        weight: FP4 codes (N, K/2) uint8, or e4m3 elements (N, K).

    Raises:
        ValueError: if a scale of 0 belongs to an element that is not 0.
    """
    is_codes = weight.dtype == torch.uint8
    is_set = (weight.view(torch.uint8) & (0x77 if is_codes else 0x7F)) != 0
    is_zero = factors == 0
    rows, columns = weight.shape
    if factors.numel() == rows:
        is_zero = is_zero.reshape(-1, 1)
    elif factors.numel() > 1:
        is_zero = is_zero.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    if (is_set & is_zero).any():
        raise ValueError(f"{described} is 0, but the elements that it scales are not; expected a positive number")


def check_finite(described: str, tensor: Tensor, *, is_parameter: bool = True) -> None:
    """Check that a tensor contains no NaN. A parameter must not contain infinity either.

    Raises:
        ValueError: if a number is bad; the message names the first.
    """
    if not tensor.is_floating_point() or tensor.itemsize == 1 or not tensor.numel():
        return
    least, greatest = torch.aminmax(tensor)
    if least.isfinite() and greatest.isfinite():
        return
    bad = ~tensor.isfinite() if is_parameter else tensor.isnan()
    if bad.any():
        place = bad.nonzero()[0].tolist()
        value, index = tensor[tuple(place)].item(), ", ".join(map(str, place))
        raise ValueError(f"{described} is {value} at [{index}]; expected finite numbers")


def e8m0_numbers(codes: Tensor) -> Tensor:
    """Decode e8m0 scales, given as uint8, to float32. Every scale is exact: byte 0 is 2^-127, a subnormal float32."""
    bits = codes.to(torch.int32) << 23
    return torch.where(codes == 0, 1 << 22, bits).view(torch.float32)


def block_factors(described: str, scale: Tensor) -> Tensor:
    """Check the scales of FP8 blocks and convert them to float32. Scales may be floats or e8m0.

    Raises:
        ValueError: for a scale that is NaN, infinite or negative.
    """
    if scale.dtype in POWERS:
        codes = scale.view(torch.uint8)
        check_scales(described, codes)
        return e8m0_numbers(codes)
    check_factors(described, scale, is_zero_allowed=True)
    return scale.float()


def check_elements(described: str, elements: Tensor) -> None:
    """Check that no e4m3 element is NaN.

    Raises:
        ValueError: if an element is NaN; the message names the first.
    """
    codes = elements.view(torch.uint8)
    if codes.numel() and (codes.amax() == 0xFF or codes.view(torch.int8).amax() == 0x7F):
        _refuse(described, codes, (codes & 0x7F) == 0x7F, "e4m3 numbers; 0x7F and 0xFF are NaN")


def _refuse(described: str, codes: Tensor, is_bad: Tensor, expected: str) -> None:
    places = is_bad.nonzero()
    index = ", ".join(map(str, places[0].tolist()))
    more = f", and {len(places) - 1:,} more such bytes" if len(places) > 1 else ""
    byte = int(codes[tuple(places[0])])
    raise ValueError(f"{described} contains the byte 0x{byte:02X} at [{index}]{more}; expected {expected}")
