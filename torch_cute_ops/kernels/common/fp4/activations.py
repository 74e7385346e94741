"""Device code that rearranges activations for MMAs with an FP4 weight, and decodes FP4 activations.

A lane reads the weight's codes in memory order, and decodes eight codes at a time into pairs
(``kernels.common.fp4.codes``). The pairs change the order in which the MMAs see the elements of k. Activations are
rearranged into the same order. Four lanes of a warp, a *quad*, share a row of an operand: lane ``q`` of the quad owns
quarter ``q`` of the row's k tile (256 or 128 elements). A *k group* consists of eight elements from each quarter, and
is multiplied by two MMAs with K = 16:

    MMA in the k tile = 2 · k_group + (half of the decoded word),    position in the MMA's K = 8 · h + 2 · q + e

for element ``e`` (0 or 1) of pair ``h`` (0 or 1) in this half. Elements beyond K are zero.

For wgmma, the rearranged bytes are an operand in shared memory. They consist of atoms: 8 tokens x 64 positions, 1,024
bytes, in which the 128-byte swizzle permutes the 16-byte vectors of each row of 128 bytes (PTX ISA,
"Matrix-descriptor"). Let ``g`` be the index of a group of eight tokens. The group's atom that begins at position ``64 ·
c`` has the index ``c · groups + g``, so the atoms of neighbouring tokens are contiguous, and one bulk copy can bring
them. (GEMMs over experts instead store all k tiles of a token group contiguously.)

For mma.sync, the bytes of a token's k tile (512, or 256 for 128 elements) are contiguous, and the next token follows. A
k group takes 64 bytes: for each quarter, the 16 bytes that a lane needs in two MMAs. K group ``p`` of token ``n`` is
stored at place ``p xor n % 2``, so that eight lanes that read two neighbouring tokens avoid bank conflicts. If tokens
are copied one by one, k group ``p`` is stored at place ``p``, and the distance between tokens is an odd number of k
groups.

With ``prologue_gate``, a row of ``a`` consists of gate and up. A lane reads both, computes ``act(gate) · up``, rounds
it to the dtype of ``a``, and rearranges it. With ``prologue_quant``, 16-bit activations are first quantised to FP4. The
lanes that hold the k groups of a block compute the block's scale together, so all lanes of a warp must call ``store``,
each with one k group.
"""

from functools import reduce
from typing import Final

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.epilogue import GATES
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, pack, store_words, unpack
from torch_cute_ops.kernels.common.fp4.codes import decode, fp4_block, pair_activations, scale_argument, scale_factors
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_BYTES, ATOM_M, ATOM_ROW_BYTES, ActivationLayout
from torch_cute_ops.runtime.argspec import Dim, TensorArg

QUAD: Final = 4  # number of lanes that share a row of an operand
K_GROUP_BYTES: Final = 64  # bytes of one token's k group after it is rearranged


def code_arguments(config: ActivationLayout) -> tuple[TensorArg, TensorArg]:
    """Return descriptions of two arguments: a matrix of FP4 codes, and its scales."""
    assert config.layout is not None
    half = Dim("a_bytes", divisibility=16)
    a = TensorArg("Uint8", (Dim("m"), half), (half, 1), align=16)
    scale = scale_argument(config.fmt, config.layout, Dim("a_scale_rows"), Dim("a_blocks"), align=1, name="a_")
    return a, scale


class Activations:
    """Device code that rearranges a matrix of activations. A thread handles one k group of one token at a time.

    Attributes:
        config: formats of the activations, before and after they are rearranged.
        k_groups: number of k groups of a k tile.
        spread: True if k tiles may begin in the middle of a scale tile.
        apart: if activations are quantised, distance in lanes between neighbouring k groups of a token.
    """

    def __init__(self, config: ActivationLayout, spread: bool = False, apart: int = ATOM_M):
        self.config, self.spread, self.apart = config, spread, apart
        self.k_groups = config.k_tile // QUAD // 8
        self.a_dtype, self.dtype = DSL_DTYPES[config.a_dtype], DSL_DTYPES[config.dtype]

    def arguments(self) -> tuple[TensorArg, TensorArg | None]:
        """Return descriptions of two arguments: the matrix, and its FP4 scales or the global scale for its
        quantisation."""
        c, m = self.config, Dim("m")
        if c.layout is None:
            k = Dim("k", divisibility=64 if c.prologue_gate is not None else 32)
            scale = TensorArg("Float32", (1,), (1,), align=4) if c.prologue_quant == "scaled" else None
            return TensorArg(self.a_dtype.__name__, (m, k), (k, 1), align=16), scale
        return code_arguments(c)

    def width(self, a):
        """Return K, the number of elements of a row of rearranged activations."""
        if self.config.prologue_gate is not None:
            return a.shape[1] // 2
        return a.shape[1] if self.config.layout is None else a.shape[1] * 2

    def read(self, a, scale, token, start, left, k_group, after: int = 0) -> list:
        """Load a k group. The result holds the words of each quarter, in memory order, for ``store``.

        Args:
            a, scale: matrix, and its scales.
            token: row of the matrix.
            start: first element of the k tile.
            left: number of elements from ``start`` to the end of the token's range of k. Elements beyond this range are
                returned as zero.
            k_group, after: the index of the k group is ``k_group + after``. ``after`` is a constant.
        """
        c, k = self.config, self.width(a)
        offset = self.offset(a, token, k) + start + k_group * 8
        begins = [q * (c.k_tile // QUAD) + after * 8 for q in range(QUAD)]
        exists = [k_group * 8 + begin < left for begin in begins]
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
            # A k tile may begin in the middle of a scale tile, so compute the address of each quarter's scales
            # separately.
            places = [(bytes_at + row + c.layout.block_offset(block + each) + k_group * 8 // size, 0) for each in after]
        else:
            byte_at = bytes_at + (row + c.layout.block_offset(block)) + k_group * 8 // size
            places = [(byte_at, c.layout.block_offset(each)) for each in after]
        return [
            [*ptx.load_if(at, there, 1, begin // 2), ptx.load_narrow_if(byte_at, there, 1, constant)]
            for begin, there, (byte_at, constant) in zip(begins, exists, places, strict=True)
        ]

    def offset(self, a, token, k):
        """Return the offset of a token's row in elements. A row has ``k`` elements, or 2 ``k`` elements if the row
        consists of gate and up."""
        return Int64(token) * (k if self.config.prologue_gate is None else a.shape[1])

    def places(self, a, offset, k) -> list[cute.Pointer]:
        """Return the addresses of the elements at ``offset``: one address or, with ``prologue_gate``, one in gate and
        one in up."""
        at = a.iterator + cute.assume(offset, divby=8)
        return [at] if self.config.prologue_gate is None else [at, at + cute.assume(k, divby=8)]

    def words(self, places: list[cute.Pointer], exists, offset: int = 0) -> list:
        """Load the eight elements that begin ``offset`` bytes after each address in ``places``, or return zeros if not
        ``exists``."""
        return [word for at in places for word in ptx.load_if(at, exists, 4, offset)]

    def gated(self, loaded: list) -> list:
        """Return eight packed 16-bit elements from ``loaded``, a result of ``words``.

        With ``prologue_gate``, the elements are ``act(gate) · up``, computed as in ``kernels.row_quant``.
        """
        return loaded if self.config.prologue_gate is None else pack(self.values(loaded), self.a_dtype)

    def values(self, words: list) -> list[Float32]:
        """Return eight elements in fp32 from ``words``. With ``prologue_gate``, they are ``act(gate) · up``, not yet
        rounded."""
        if self.config.prologue_gate is None:
            return unpack(words, self.a_dtype)
        gate_mul = GATES[self.config.prologue_gate]
        gates, ups = (unpack(half, self.a_dtype) for half in (words[:4], words[4:]))
        return [gate_mul(gate, up) for gate, up in zip(gates, ups, strict=True)]

    def quantised(self, words: list) -> list:
        """Quantise eight elements that ``read`` loaded. Return their codes in a word, and the scale byte of their
        block."""
        c, global_scale = self.config, None
        if c.prologue_quant == "scaled":
            *words, global_scale = words
        values = self.values(words)
        amax = reduce(ptx.max_abs_nan, values, Float32(0.0))
        for i in range(c.fmt.block_size // 16):
            amax = ptx.max_abs_nan(amax, cute.arch.shuffle_sync_bfly(amax, self.apart << i))
        (codes,), byte = fp4_block(values, amax, global_scale, c.fmt, has_e2m1_cvt=False, part=len(values))
        return [codes, byte]

    def store(self, quarters: list, groups, k_group, token, base: cute.Pointer) -> None:
        """Convert a k group that ``read`` loaded to the MMAs' dtype, and store it in the k tile at ``base``.

        Args:
            quarters: result of ``read``.
            groups: number of groups of eight tokens in the k tile. Only the layout for wgmma depends on it.
            k_group: index of the k group.
            token: index of the token in the k tile.
            base: address of the k tile.
        """
        words = [self._converted(quarter) for quarter in quarters]
        if self.config.by_warp:
            offset = token * self.config.token_bytes + (k_group ^ (token % 2)) * K_GROUP_BYTES
            start = base + cute.assume(offset, divby=K_GROUP_BYTES)
            for q, quarter in enumerate(words):
                to = cute.recast_ptr(start + q * 16, dtype=Uint32)
                store_words(quarter, cute.make_tensor(to, cute.make_layout(QUAD)))
            return
        row = token % ATOM_M
        for half in range(2):
            step = k_group * 2 + half
            tile = step // 4 * groups + token // ATOM_M
            start = base + cute.assume(tile * ATOM_BYTES + row * ATOM_ROW_BYTES, divby=ATOM_ROW_BYTES)
            for h in range(2):
                place = (step % 4 * 2 + h) ^ row
                to = cute.recast_ptr(start + cute.assume(place * 16, divby=16), dtype=Uint32)
                store_words([quarter[2 * half + h] for quarter in words], cute.make_tensor(to, cute.make_layout(QUAD)))

    def store_row(self, quarters: list, k_group, base: cute.Pointer) -> None:
        """Convert a k group, and store it in a single token's k tile, which begins at ``base`` and is contiguous.

        For wgmma, ``copy_rows`` later copies the row to swizzled atoms, so the 128-byte lines are stored without a
        swizzle. For mma.sync, k groups follow each other, and the distance between tokens must be an odd number of k
        groups.
        """
        words = [self._converted(quarter) for quarter in quarters]
        if not self.config.by_warp:
            words = [[quarter[i] for quarter in words] for i in range(QUAD)]
        for i, line in enumerate(words):
            at = base + cute.assume(k_group * K_GROUP_BYTES + i * 16, divby=16)
            to = cute.recast_ptr(at, dtype=Uint32)
            store_words(line, cute.make_tensor(to, cute.make_layout(QUAD)))

    def copy_rows(self, base: cute.Pointer, row: cute.Pointer, exists, lane) -> None:
        """Start the copies (``cp.async``) of eight tokens of a k tile to shared memory at ``base``, in the layout for
        wgmma.

        The k tile must have 256 elements. Four lanes of the warp copy token ``lane // 4``, if it ``exists``, from
        ``row``, where ``store_row`` stored it.
        """
        line, quarter = lane // QUAD, lane % QUAD
        vectors = ATOM_ROW_BYTES // 16
        for first in range(0, self.config.token_bytes // 16, QUAD):
            place = first // vectors * ATOM_BYTES + line * ATOM_ROW_BYTES + ((first % vectors + quarter) ^ line) * 16
            source = row + cute.assume((first + quarter) * 16, divby=16)
            ptx.copy_async_16(base + cute.assume(place, divby=16), source, exists)

    def _converted(self, words: list) -> list:
        """Return eight elements in the MMAs' dtype, in the order in which ``decode`` pairs the weight's codes."""
        c = self.config
        if c.prologue_quant is not None:
            words = self.quantised(words)
        elif c.layout is None:
            words = self.gated(words)
            if c.a_dtype != c.dtype:
                words = pack(unpack(words, self.a_dtype), self.dtype)
            return pair_activations(words, self.dtype)
        codes, byte = words
        factors = scale_factors(byte, self.dtype, c.fmt)
        return [word for pair in decode([codes], factors[:1], self.dtype, c.fmt)[0] for word in pair]
