"""Checks of one-byte values in checkpoints.

Each check reads a tensor once or twice, and copies it only if it fails.
"""

from typing import Final

import torch
from torch import Tensor

_NAN: Final = {torch.float8_e4m3fn: 0x7F, torch.uint8: 0xFF}
"""Byte of NaN by dtype of block scales; e8m0 scales are uint8. All larger bytes have the sign bit set."""


def check_scales(described: str, scale: Tensor) -> None:
    """Refuse block scales (e4m3 or e8m0) that are NaN or have the sign bit set. No producer writes minus zero.

    Args:
        described: tensor name and file, for messages.
        scale: block scales on the CPU; e8m0 as uint8.

    Raises:
        ValueError: naming the first bad scale.
    """
    codes, nan = scale.view(torch.uint8), _NAN[scale.dtype]
    if codes.numel() and codes.amax() >= nan:
        range_ = "from 0 to 448" if scale.dtype == torch.float8_e4m3fn else "of 8 exponent bits, except 0xFF (NaN)"
        _refuse(described, codes, codes >= nan, f"block scales {range_}")


def check_elements(described: str, elements: Tensor) -> None:
    """Refuse e4m3 elements that are NaN.

    Raises:
        ValueError: naming the first bad element.
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
