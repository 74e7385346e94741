"""Activations rearranged for MMAs with an FP4 weight: in the weight's order of k, and decoded if they are in FP4.

A lane reads the weight's codes as they lie in memory and decodes eight at a time into pairs (``kernels.common.
fp4_weights``). So its elements of k come in another order, and the activations are brought into the same. Of a chunk of
256 elements of k (or 128), quarter ``q`` belongs to lane ``q`` of a quad. A *piece* is eight elements of each quarter,
which two k16 steps of an MMA take:

    step = 2 · piece + (half of the decoded word),    position in the step = 8 · h + 2 · q + e

for element ``e`` of pair ``h``. Elements from K on are zero.

For wgmma the rearranged bytes are those of its operand in shared memory: tiles of 8 tokens x 64 positions, 1,024 bytes,
in which the 16-byte pieces of each row of 128 bytes are permuted by the 128-byte swizzle (PTX ISA,
"Matrix-descriptor"). The tile of token group ``g`` and positions ``64 · c ...`` is number ``c · groups + g``, so that
one bulk copy brings the tiles of neighbouring tokens. (GEMMs over experts have one chunk after the other for each group
of eight tokens.)

For mma.sync a token has 512 bytes (or 256) of a chunk, and the next token follows. Its piece ``p`` is 64 bytes, at
place ``p xor n % 2`` of token ``n``: for each quarter the 16 bytes that a lane needs in two steps. So eight lanes
that read two neighbouring tokens have no bank conflicts. Where tokens are copied one by one, piece ``p`` is at
place ``p``, and the next token follows after an odd number of pieces.

With a gate in front (``gated``) a row as given is gate and up, a lane reads both, and what it rearranges is
``silu(gate) · up``, rounded to their dtype. Activations of 16 bits may be quantised to FP4 first (``quantises``): lanes
that have the pieces of a block find its scale together, so all lanes of a warp come to ``store``, each with a piece.
"""

from functools import reduce
from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import silu_mul
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, pack, store_words, unpack
from torch_cute_ops.kernels.common.fp4.decode import decode, pair_activations, scale_argument, scale_factors
from torch_cute_ops.kernels.common.fp4.encode import fp4_block
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES, ActivationLayout
from torch_cute_ops.runtime.argspec import Dim, TensorArg

QUAD: Final = 4  # lanes that share a row of an operand
STEPS_BYTES: Final = 64  # of two k16 steps of a token


class Activations:
    """A matrix of activations, and how a thread rearranges one piece of a chunk of one token.

    Attributes:
        pieces: pieces of a chunk.
        spread: whether chunks may begin in the middle of a tile of scales.
        apart: how many lanes on the next piece of a token is, where activations are quantised.
    """

    def __init__(self, config: ActivationLayout, spread: bool = False, apart: int = ATOM_M):
        self.config, self.spread, self.apart = config, spread, apart
        self.pieces = config.k_tile // QUAD // 8
        self.a_dtype, self.dtype = DSL_DTYPES[config.a_dtype], DSL_DTYPES[config.dtype]

    def arguments(self) -> tuple[TensorArg, TensorArg | None]:
        """The matrix, and its scales if it is in FP4; or the global scale by which it is quantised."""
        c, m = self.config, Dim("m")
        if c.layout is None:
            k = Dim("k", divisibility=64 if c.gated else 32)
            scale = TensorArg("Float32", (1,), (1,), align=4) if c.quantises == "scaled" else None
            return TensorArg(self.a_dtype.__name__, (m, k), (k, 1), align=16), scale
        half = Dim("a_bytes", divisibility=16)
        a = TensorArg("Uint8", (m, half), (half, 1), align=16)
        return a, scale_argument(c.fmt, Dim("a_scale_rows"), Dim("a_blocks"), align=1)

    def width(self, a):
        """Elements of k."""
        if self.config.gated:
            return a.shape[1] // 2
        return a.shape[1] if self.config.layout is None else a.shape[1] * 2

    def read(self, a, scale, token, start, left, piece, after: int = 0) -> list:
        """Load a piece for ``store``: for each quarter its words as they lie in memory.

        Args:
            a, scale: the matrix and its scales.
            token: row of the matrix.
            start: first element of k of the chunk.
            left: elements of the chunk that exist; others are zero.
            piece, after: which piece: ``piece + after``, of which ``after`` is a constant.
        """
        c, k = self.config, self.width(a)
        offset = self.offset(a, token, k) + start + piece * 8
        begins = [q * (c.k_tile // QUAD) + after * 8 for q in range(QUAD)]
        exists = [piece * 8 + begin < left for begin in begins]
        if c.layout is None:
            places = self.places(a, offset, k)
            pairs = zip(begins, exists, strict=True)
            quarters = [self.words(places, there, begin * c.a_dtype.itemsize) for begin, there in pairs]
            return quarters if scale is None else [[*words, scale[0]] for words in quarters]
        at = a.iterator + cute.assume(offset // 2, divby=4)
        size = c.fmt.block_size
        row, block = c.layout.row_offset(Int64(token), k // size), start // size
        bytes_at = cute.recast_ptr(scale.iterator, dtype=Uint8)
        after = [begin // size for begin in begins]
        if self.spread:
            # In which tile a quarter's blocks are depends on where the chunk begins.
            places = [(bytes_at + row + c.layout.block_offset(block + each) + piece * 8 // size, 0) for each in after]
        else:
            byte_at = bytes_at + (row + c.layout.block_offset(block)) + piece * 8 // size
            places = [(byte_at, c.layout.block_offset(each)) for each in after]
        return [
            [*ptx.load_if(at, there, 1, begin // 2), ptx.load_narrow_if(byte_at, there, 1, constant)]
            for begin, there, (byte_at, constant) in zip(begins, exists, places, strict=True)
        ]

    def offset(self, a, token, k):
        """Elements before a token's row, which has ``k``, or gate and up."""
        return Int64(token) * (a.shape[1] if self.config.gated else k)

    def places(self, a, offset, k) -> list[cute.Pointer]:
        """Where 16-bit elements lie, by their ``offset``: those of a row, or those of gate and of up."""
        at = a.iterator + cute.assume(offset, divby=8)
        return [at, at + cute.assume(k, divby=8)] if self.config.gated else [at]

    def words(self, places: list[cute.Pointer], exists, offset: int = 0) -> list:
        """Load eight elements, ``offset`` bytes behind each of the places; zeros, unless they exist."""
        return [word for at in places for word in ptx.load_if(at, exists, 4, offset)]

    def gated(self, words: list) -> list:
        """Eight elements of 16 bits, of what ``words`` has loaded: behind the gate, if there is one, as
        ``kernels.row_quant`` computes and rounds it."""
        return pack(self.values(words), self.a_dtype) if self.config.gated else words

    def values(self, words: list) -> list[Float32]:
        """The same before they are rounded."""
        if not self.config.gated:
            return unpack(words, self.a_dtype)
        gates, ups = (unpack(half, self.a_dtype) for half in (words[:4], words[4:]))
        return [silu_mul(gate, up) for gate, up in zip(gates, ups, strict=True)]

    def quantised(self, words: list) -> list:
        """The codes of eight elements, of what ``read`` has loaded, and the scale byte of their block."""
        c, global_scale = self.config, None
        if c.quantises == "scaled":
            *words, global_scale = words
        values = self.values(words)
        amax = reduce(ptx.max_abs_nan, values, Float32(0.0))
        for pieces in range(c.fmt.block_size // 16):
            amax = ptx.max_abs_nan(amax, cute.arch.shuffle_sync_bfly(amax, self.apart << pieces))
        (codes,), byte = fp4_block(values, amax, global_scale, c.fmt, has_e2m1_cvt=False, part=len(values))
        return [codes, byte]

    def store(self, quarters: list, groups, piece, token, base: cute.Pointer) -> None:
        """Convert what ``read`` has loaded, and store it to its place in a chunk that starts at ``base``.

        ``groups`` are the chunk's groups of eight tokens, which only the layout for wgmma depends on; ``token`` is the
        place among its tokens.
        """
        words = [self._converted(quarter) for quarter in quarters]
        if self.config.by_warp:
            offset = token * self.config.token_bytes + (piece ^ (token % 2)) * STEPS_BYTES
            start = base + cute.assume(offset, divby=STEPS_BYTES)
            for q, quarter in enumerate(words):
                to = cute.recast_ptr(start + q * 16, dtype=Uint32)
                store_words(quarter, cute.make_tensor(to, cute.make_layout(QUAD)))
            return
        row = token % ATOM_M
        for half in range(2):
            step = piece * 2 + half
            tile = step // 4 * groups + token // ATOM_M
            start = base + cute.assume(tile * ATOM_BYTES + row * ATOM_ROW_BYTES, divby=ATOM_ROW_BYTES)
            for h in range(2):
                place = (step % 4 * 2 + h) ^ row
                to = cute.recast_ptr(start + cute.assume(place * 16, divby=16), dtype=Uint32)
                store_words([quarter[2 * half + h] for quarter in words], cute.make_tensor(to, cute.make_layout(QUAD)))

    def store_row(self, quarters: list, piece, base: cute.Pointer) -> None:
        """The same, to a chunk of one token, contiguous from ``base`` on: as in the first row of a tile, one line after
        the other, for ``copy_rows``; or for mma.sync piece after piece, for a pitch of an odd number of pieces."""
        words = [self._converted(quarter) for quarter in quarters]
        if not self.config.by_warp:
            words = [[quarter[i] for quarter in words] for i in range(QUAD)]
        for i, line in enumerate(words):
            at = base + cute.assume(piece * STEPS_BYTES + i * 16, divby=16)
            to = cute.recast_ptr(at, dtype=Uint32)
            store_words(line, cute.make_tensor(to, cute.make_layout(QUAD)))

    def copy_rows(self, base: cute.Pointer, row: cute.Pointer, exists, lane) -> None:
        """A warp starts the copies (``cp.async``) of eight tokens of a chunk of 256 elements to ``base`` in shared
        memory, for wgmma.

        Four lanes have a token, number ``lane // 4``, if it ``exists``: ``row`` is where ``store_row`` has stored it.
        """
        line, quarter = lane // QUAD, lane % QUAD
        pieces = ATOM_ROW_BYTES // 16
        for first in range(0, self.config.token_bytes // 16, QUAD):
            place = first // pieces * ATOM_BYTES + line * ATOM_ROW_BYTES + ((first % pieces + quarter) ^ line) * 16
            source = row + cute.assume((first + quarter) * 16, divby=16)
            ptx.copy_async_16(base + cute.assume(place, divby=16), source, exists)

    def _converted(self, words: list) -> list:
        """Eight elements in the dtype of the MMAs, as ``decode`` pairs them."""
        c = self.config
        if c.quantises is not None:
            words = self.quantised(words)
        elif c.layout is None:
            words = self.gated(words)
            if c.a_dtype != c.dtype:
                words = pack(unpack(words, self.a_dtype), self.dtype)
            return pair_activations(words, self.dtype)
        codes, byte = words
        factors = scale_factors(byte, self.dtype, c.fmt)
        return [word for pair in decode([codes], factors[:1], self.dtype, c.fmt)[0] for word in pair]
