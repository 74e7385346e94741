"""Activations as tensor cores take them beside an FP4 weight: decoded if they are in FP4, in the weight's order of k.

A lane of the product reads codes of the weight as they lie, and decodes eight at a time into pairs (see
``kernels.common.fp4_weights``); so its k is in another order, and the activations are put into the same. Of a chunk of
256 elements of k (or 128) the quarter ``q`` goes to lane ``q`` of a quad. A *piece* is eight elements of each quarter,
and two k16 steps:

    step = 2 · piece + (half of the decoded word),    position in the step = 8 · h + 2 · q + e

for element ``e`` of pair ``h``. What is beyond k is zero.

For a product of warpgroups what is written are the very bytes of shared memory: tiles of 8 tokens x 64 positions, 1,024
bytes, rows of 128 bytes whose 16-byte pieces are swapped as wgmma's 128-byte swizzle wants it (PTX ISA,
"Matrix-descriptor"). Tile (group of tokens ``g``, 64 positions ``c``) is the ``c · groups + g``-th, so that the tiles
of neighbouring tokens are one bulk copy. (Products over experts have each eight tokens as a chunk of their own.)

For a product of warps a token is 512 bytes (or 256), one after the other: for each piece ``p`` the 16 bytes of each
quarter that a lane of mma.sync wants for two steps, 64 bytes at the ``(p xor n % 2)``-th place of token ``n``. So
eight lanes that read two neighbouring tokens meet no bank twice.
"""

from typing import Final

import cutlass.cute as cute
from cutlass import Int64, Uint8, Uint32

from torch_cute_ops.kernels.activation_tiles.config import TILE_BYTES, TILE_LINE, TILE_TOKENS, Config
from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.kernels.common.convert import DSL_DTYPES, store_words
from torch_cute_ops.kernels.common.fp4_weights import decode, pair_activations, scale_argument, scale_factors
from torch_cute_ops.runtime.argspec import Dim, TensorArg

QUAD: Final = 4  # lanes that share a row of an operand
STEPS_BYTES: Final = 64  # of two k16 steps of a token


class Activations:
    """A matrix of activations, and how a thread puts in order what it has read: a piece of a chunk, of one token.

    Attributes:
        pieces: of a chunk.
    """

    def __init__(self, config: Config):
        self.config = config
        self.pieces = config.chunk // QUAD // 8
        self.dtype = DSL_DTYPES[config.dtype]

    def arguments(self) -> tuple[TensorArg, TensorArg | None]:
        """The matrix, and its scales if it is in FP4."""
        c, m = self.config, Dim("m")
        if c.layout is None:
            k = Dim("k", divisibility=32)
            return TensorArg(self.dtype.__name__, (m, k), (k, 1), align=16), None
        half = Dim("a_bytes", divisibility=16)
        a = TensorArg("Uint8", (m, half), (half, 1), align=16)
        return a, scale_argument(c.fmt, Dim("a_scale_rows"), Dim("a_blocks"), align=1)

    def width(self, a):
        """Elements of k."""
        return a.shape[1] if self.config.layout is None else a.shape[1] * 2

    def read(self, a, scale, token, start, left, piece, after: int = 0) -> list:
        """What ``order`` wants, of the chunk from element ``start`` of k on and the piece that comes ``after`` pieces
        later: of each quarter words as they lie in memory, zeros from the chunk's ``left``-th element on."""
        c, k = self.config, self.width(a)
        offset = Int64(token) * k + start + piece * 8
        begins = [q * (c.chunk // QUAD) + after * 8 for q in range(QUAD)]
        exists = [piece * 8 + begin < left for begin in begins]
        if c.layout is None:
            at = a.iterator + cute.assume(offset, divby=8)
            pairs = zip(begins, exists, strict=True)
            return [ptx.load_if(at, there, 4, begin * c.dtype.itemsize) for begin, there in pairs]
        at = a.iterator + cute.assume(offset // 2, divby=4)
        size = c.fmt.block_size
        place = c.layout.row_offset(Int64(token), k // size) + c.layout.block_offset(start // size)
        byte_at = cute.recast_ptr(scale.iterator, dtype=Uint8) + place + piece * 8 // size
        return [
            [
                *ptx.load_if(at, there, 1, begin // 2),
                ptx.load_byte_if(byte_at, there, c.layout.block_offset(begin // size)),
            ]
            for begin, there in zip(begins, exists, strict=True)
        ]

    def order(self, quarters: list, groups, piece, token, base: cute.Pointer) -> None:
        """Store what was read to where it belongs in a chunk of ``groups`` groups of tokens, from byte ``base``;
        ``token`` is its place among these. Products of warps have any number of groups."""
        words = [self._decoded(quarter) for quarter in quarters]
        if self.config.by_warp:
            offset = token * self.config.token_bytes + (piece ^ (token % 2)) * STEPS_BYTES
            start = base + cute.assume(offset, divby=STEPS_BYTES)
            for q, quarter in enumerate(words):
                to = cute.recast_ptr(start + q * 16, dtype=Uint32)
                store_words(quarter, cute.make_tensor(to, cute.make_layout(QUAD)))
            return
        row = token % TILE_TOKENS
        for half in range(2):
            step = piece * 2 + half
            tile = step // 4 * groups + token // TILE_TOKENS
            start = base + cute.assume(tile * TILE_BYTES + row * TILE_LINE, divby=TILE_LINE)
            for h in range(2):
                place = (step % 4 * 2 + h) ^ row
                to = cute.recast_ptr(start + cute.assume(place * 16, divby=16), dtype=Uint32)
                store_words([quarter[2 * half + h] for quarter in words], cute.make_tensor(to, cute.make_layout(QUAD)))

    def _decoded(self, words: list) -> list:
        """Eight elements, as ``decode`` pairs them."""
        c = self.config
        if c.layout is None:
            return pair_activations(words, self.dtype)
        codes, byte = words
        factors = scale_factors(byte, self.dtype, c.fmt)
        return [word for pair in decode([codes], factors[:1], self.dtype, c.fmt)[0] for word in pair]
