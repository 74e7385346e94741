"""What a token has for each of its experts, (M, topk) words in memory: a thread loads them by vectors if it can."""

import cutlass.cute as cute
from cutlass import Int64

from torch_cute_ops.kernels.common import ptx


def _words_at_once(topk: int) -> int:
    return 4 if topk % 4 == 0 else 1


def alignment(topk: int) -> int:
    """What the tensor's address is a multiple of, in bytes."""
    return 4 * _words_at_once(topk)


def words_of_token(tensor: cute.Tensor, token, topk: int, exists=True) -> list:
    """The ``topk`` words of a token; zeros, unless it ``exists``."""
    count = _words_at_once(topk)
    start = tensor.iterator + cute.assume(Int64(token) * topk, divby=count)
    return [word for j in range(0, topk, count) for word in ptx.load_if(start, exists, count, 4 * j)]
