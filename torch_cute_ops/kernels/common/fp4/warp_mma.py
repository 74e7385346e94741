"""MMAs of a warp (mma.sync) with an FP4 weight that it has decoded in registers."""

import cutlass.cute as cute
from cutlass import BFloat16, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.convert import load_words
from torch_cute_ops.kernels.common.fp4.activation_layout import TILE_TOKENS
from torch_cute_ops.kernels.common.fp4.activations import STEPS_BYTES


def multiply_word(
    pairs: list, word: int, tokens: int, chunk_at: cute.Pointer, pitch: int, lane, sums: cute.Tensor, dtype
) -> None:
    """Add two k16 steps to the sums of 16 rows of the weight and ``tokens`` tokens.

    Args:
        pairs: what ``decode`` makes of the ``word``-th words of a lane's two rows.
        word: index of the word in the lane's quarter of a chunk.
        tokens: a multiple of 8.
        chunk_at: the chunk of activations in shared memory, in the layout for mma.sync
            (``kernels.common.fp4.activations``).
        pitch: bytes from a token to the next. Where it is an odd number of pieces, no piece is moved.
        lane: index in the warp.
        sums: accumulators, four for each eight tokens.
        dtype: dtype of the operands.
    """
    name = "bf16" if dtype is BFloat16 else "f16"
    token, quarter = lane // 4, lane % 4
    place = token * pitch + quarter * 16 + word * STEPS_BYTES
    if pitch // STEPS_BYTES % 2 == 0:
        # Piece ``word`` is at place ``word xor token % 2``.
        place = place + (1 - word % 2 * 2) * (token % 2) * STEPS_BYTES
    for group in range(tokens // TILE_TOKENS):
        at = chunk_at + cute.assume(place + group * (TILE_TOKENS * pitch), divby=16)
        activations = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        total = [sums[4 * group + i] for i in range(4)]
        for step in range(2):
            weights = [pairs[r][step][high] for high in range(2) for r in range(2)]
            total = ptx.mma_16x8x16(weights, activations[2 * step : 2 * step + 2], total, name)
        for i, value in enumerate(total):
            sums[4 * group + i] = value
