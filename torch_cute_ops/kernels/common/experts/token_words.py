"""What kernels that gather tokens share: loads of a token's ``topk`` words, one for each of its experts, from an
(M, topk) tensor, by vectors if possible."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.convert import DSL_DTYPES


class TokenKernel:
    """A kernel of one ``Config``, for tokens of ``config.dtype``."""

    def __init__(self, config: Any):
        self.config = config
        self.dtype = DSL_DTYPES[config.dtype]


def _words_at_once(topk: int) -> int:
    return 4 if topk % 4 == 0 else 1


def alignment(topk: int) -> int:
    """The alignment in bytes that the tensor needs."""
    return 4 * _words_at_once(topk)


def words_of_token(tensor: cute.Tensor, token, topk: int, exists=True) -> list:
    """The ``topk`` words of a token; zeros unless it ``exists``."""
    count = _words_at_once(topk)
    start = tensor.iterator + cute.assume(Int64(token) * topk, divby=count)
    return [word for j in range(0, topk, count) for word in ptx.load_if(start, exists, count, 4 * j)]
