"""Memory as words, four at a time."""

import cutlass.cute as cute
from cutlass import Uint32


def by_four(at: cute.Pointer, size: int) -> cute.Tensor:
    """``size`` bytes as words (n, 4)."""
    return cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout((size // 16, 4), stride=(4, 1)))
