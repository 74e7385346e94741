"""Activations that are interleaved along k, so that a kernel can read the weight's codes 16 bytes at a time.

Element ``64c + 32p + 8i + 4h + e`` of each 256 elements of a row is stored at position ``128p + 32i + 16h + 4c + e``.
"""

from typing import Final

import torch

INTERLEAVED_K: Final = 256
"""Number of elements of a row that are interleaved with each other."""
_STORED: Final = (4, 2, 4, 2, 4)
"""Extents of c, p, i, h and e."""


def interleave_k(a: torch.Tensor) -> torch.Tensor:
    """Interleave the elements of each row of FP8 activations, for :func:`mm_fp8_fp4` and :func:`grouped_mm_fp8_fp4`.

    In each 256 elements of a row, element ``64c + 32p + 8i + 4h + e`` moves to position ``128p + 32i + 16h + 4c + e``,
    with c, i and e from 0 to 3, and p and h 0 or 1. The result has one more dimension than ``a``, by which the ops
    recognise it. :func:`deinterleave_k` is the inverse.

    Args:
        a: (..., K), elements of 1 byte, such as float8_e4m3fn.

    Returns:
        (..., ⌈K/256⌉, 256) in the dtype of ``a``, contiguous. Elements beyond K are zero.

    Raises:
        TypeError: if ``a`` is not a tensor with elements of 1 byte.
        ValueError: if ``a`` has no dimension.

    Example:
        >>> import torch
        >>> from torch_cute_ops import deinterleave_k, interleave_k
        >>> a = torch.arange(64, dtype=torch.uint8)[None]
        >>> b = interleave_k(a)
        >>> tuple(b.shape), b[0, 0, :8].tolist(), b[0, 0, 16:20].tolist()
        ((1, 1, 256), [0, 1, 2, 3, 0, 0, 0, 0], [4, 5, 6, 7])
        >>> torch.equal(deinterleave_k(b, 64), a)
        True
    """
    _check("interleave_k", a, 1)
    k = a.shape[-1]
    stored = torch.nn.functional.pad(a.view(torch.uint8), (0, -k % INTERLEAVED_K))
    stored = stored.unflatten(-1, (-1, *_STORED)).movedim((-4, -3, -2, -5), (-5, -4, -3, -2))
    return stored.flatten(-5).contiguous().view(a.dtype)


def deinterleave_k(a: torch.Tensor, k: int) -> torch.Tensor:
    """Undo :func:`interleave_k`.

    Args:
        a: (..., ⌈K/256⌉, 256), elements of 1 byte, as :func:`interleave_k` returns them.
        k: K, the number of elements of a row.

    Returns:
        (..., K) in the dtype of ``a``, contiguous.

    Raises:
        TypeError: if ``a`` is not a tensor with elements of 1 byte.
        ValueError: if ``a`` has another shape.
    """
    _check("deinterleave_k", a, 2)
    groups = -(-k // INTERLEAVED_K)
    if a.shape[-2:] != (groups, INTERLEAVED_K):
        raise ValueError(
            f"deinterleave_k: got a with shape {tuple(a.shape)}; expected (..., {groups}, {INTERLEAVED_K}), for k={k}"
        )
    c, p, i, h, e = _STORED
    elements = a.view(torch.uint8).unflatten(-1, (p, i, h, c, e)).movedim(-2, -5)
    return elements.flatten(-6)[..., :k].contiguous().view(a.dtype)


def _check(name: str, a: torch.Tensor, dimensions: int) -> None:
    """Check that the argument of the public function ``name`` has 1-byte elements and this number of dimensions."""
    if not isinstance(a, torch.Tensor):
        raise TypeError(f"{name}: a is {a!r}, a {type(a).__name__}; expected a tensor")
    if a.dtype.itemsize != 1:
        raise TypeError(f"{name}: got a with dtype {a.dtype}; expected elements of 1 byte, such as float8_e4m3fn")
    if a.dim() < dimensions:
        expected = "(..., K)" if dimensions == 1 else "(..., ⌈K/256⌉, 256)"
        raise ValueError(f"{name}: got a with shape {tuple(a.shape)}; expected {expected}")
