"""One row of activations in a tile: a column of the MMAs for each block of the weight's scales, in place of one for
each row of activations.

With one row, seven of the eight columns of an ``mma.sync`` would be idle. Here column ``2 · q + h`` has the elements of
those blocks alone that lane ``q`` of a quad has codes of: of its four blocks of a chunk the first or the second
(``h`` = 0 or 1), and behind these, in sums of their own, the third or the fourth. So an accumulator is the sum of a
block, of codes without their scale; the lane that has it has also loaded the scale, and adds the sum to its total with
one fma for each 16 products, where two codes take a multiplication otherwise.

Activations are multiplied as float16. A block of bfloat16 is brought to float16's range by a power of two, and one of
FP4 keeps its scale: factors of their own in fp32, which the scales of the weight are multiplied by. 16-bit ones may be
quantised to FP4 first (``ActivationLayout.quantises``), behind a gate or not: two neighbouring lanes have a block.
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, pack, store_words, unpack
from torch_cute_ops.kernels.common.fp4.activations import QUAD, Activations
from torch_cute_ops.kernels.common.fp4.decode import float16_pairs, pair_activations
from torch_cute_ops.kernels.common.fp4.layouts import ActivationLayout
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.kernels.fp4_wgmma.config import CHUNK_BLOCKS, ROW_BYTES, ROW_STAGE_BYTES, ZEROS_AT, Config
from torch_cute_ops.kernels.fp4_wgmma.mma import Consumer, Mma, Stages

LARGEST = 15
"""Exponent that the largest element of a block of bfloat16 gets: the largest of float16, whose mantissa is longer."""
CODE_EXPONENT = 14
"""``float16_pairs`` gives e2m1 · 2^-14."""


class RowActivations(Activations):
    """Pieces of one row: eight elements each, half a block, which a lane rearranges; its neighbour has the other half.

    In a stage they follow each other, as float16 in the order in which the weight's codes are paired, and behind them
    the factors of the blocks, if there are any (``has_factors``).
    """

    def __init__(self, config: ActivationLayout):
        super().__init__(config, apart=1)
        self.pieces = 2 * CHUNK_BLOCKS
        self.has_factors = self.a_dtype is not Float16 or config.quantises is not None

    def read(self, a, scale, token, start, left, piece, after: int = 0) -> list:
        """Load a piece for ``store``; arguments as of ``Activations.read``."""
        c, k = self.config, self.width(a)
        size = c.fmt.block_size
        exists = piece * 8 < left
        offset = self.offset(a, token, k) + start + piece * 8
        if c.layout is None:
            words = self.words(self.places(a, offset, k), exists)
            return words if scale is None else [*words, scale[0]]
        codes = ptx.load_if(a.iterator + cute.assume(offset // 2, divby=4), exists, 1)
        place = c.layout.row_offset(Int64(token), k // size) + c.layout.block_offset(start // size + piece // 2)
        byte = ptx.load_narrow_if(cute.recast_ptr(scale.iterator, dtype=Uint8) + place, exists, 1)
        return [*codes, byte]

    def store(self, words: list, groups, piece, token, base: cute.Pointer) -> None:
        """Convert what ``read`` has loaded, and store it to the stage that starts at ``base``. All lanes of a warp come
        here, with one piece after the other."""
        factor, c = None, self.config
        if c.layout is not None or c.quantises is not None:
            codes, factor = self._codes(words)
            words = float16_pairs(codes)
        else:
            words = self.gated(words)
            if self.has_factors:
                words, factor = self._in_range(words)
            words = pair_activations(words, Float16)
        to = cute.recast_ptr(base + cute.assume(piece * 16, divby=16), dtype=Uint32)
        store_words(words, cute.make_tensor(to, cute.make_layout(4)))
        if factor is not None:
            self._store_factor(factor, piece, base + ROW_BYTES)

    def _store_factor(self, factor: Float32, piece, factors: cute.Pointer) -> None:
        at = factors + cute.assume(piece // 2 * 4, divby=4)
        ptx.store_shared_if(at, ptx.bits_of(factor), piece % 2 == 0)

    def _codes(self, words: list) -> tuple:
        """A word of codes, of FP4 activations or of what is quantised, and the factor of its block."""
        codes, byte = words if self.config.quantises is None else self.quantised(words)
        return codes, ptx.unpack_f16(ptx.f16x2_of_e4m3x2(byte), 0)

    def _in_range(self, words: list) -> tuple[list, Float32]:
        """Half a block of bfloat16 as float16, and the block's factor, a power of two, with that of the codes.

        Exact but for elements below 2^-32 of the block's largest, of which multiples of 2^-40 of that are left.
        """
        largest = Uint32(0)
        for word in words:
            for half in (word & Uint32(0x7FFF0000), (word << 16) & Uint32(0x7FFF0000)):
                largest = ptx.select(half > largest, half, largest)
        other = cute.arch.shuffle_sync_bfly(largest, 1)
        # A field of fp32's exponent, with room for those of both powers of two
        field = ptx.select(other > largest, other, largest) >> 23
        least, most = Uint32(1 + LARGEST), Uint32(254)
        field = ptx.select(field < least, least, field)
        field = ptx.select(field > most, most, field)
        multiplier = ptx.float_of((Uint32(2 * 127 + LARGEST) - field) << 23)
        factor = ptx.float_of((field - Uint32(LARGEST - CODE_EXPONENT)) << 23)
        values = [ptx.mul_rn(value, multiplier) for value in unpack(words, BFloat16)]
        return pack(values, Float16), factor


class RowMma(Mma):
    """The MMAs of a warp with its band of the weight and one row of activations. A lane has four sums: of the weight's
    rows ``row`` and ``row + 8``, and of two columns.

    Attributes:
        exponent: sums of products of codes are true sums times 2 to the minus ``exponent``.
    """

    exponent = 2 * CODE_EXPONENT

    def __init__(self, config: Config, ring: WeightStages, activations: RowActivations):
        self.has_factors = activations.has_factors
        # Of bfloat16 the factors have the codes' power of two, and FP4 has codes on both sides.
        exponent = {BFloat16: 0, Float16: CODE_EXPONENT}.get(activations.a_dtype)
        if exponent is None or activations.config.quantises is not None:
            exponent = self.exponent
        super().__init__(config, ring, 2.0**exponent)

    def multiply(self, start, adds, first, i, stages: Stages, sums, consumer: Consumer, part, smem) -> Stages:
        stage, parity, token_stage, token_parity, _ = stages
        smem.weight_pipeline.wait_full(stage, parity)
        smem.a_pipeline.wait_full(token_stage, token_parity)
        existing, quad = self._existing(first + i, consumer, part), consumer.quad
        rows, scale_rows = ((row, row + 8) for row in (consumer.row, consumer.scale_row))
        codes = [self.ring.codes(smem.codes, stage, row, quad) for row in rows]
        scales = [self._scales(smem.scales, stage, row, quad, existing) for row in scale_rows]
        at = token_stage * ROW_STAGE_BYTES
        if self.has_factors:
            factors = self._factors(smem.tokens + cute.assume(at + ROW_BYTES + quad * 16, divby=16))
            scales = [[ptx.mul_rn(s, f) for s, f in zip(row, factors, strict=True)] for row in scales]
        # The lane's elements of the other operand are those of the column's block, or zero.
        column, quarter = consumer.lane // QUAD, at + quad * (ROW_BYTES // QUAD)
        places = [ptx.select(column == 2 * quad + h, quarter, Int32(ZEROS_AT)) for h in range(2)]
        for half in range(2):
            total = [Float32(0.0)] * 4
            for word in range(half * 4, half * 4 + 4):
                place = smem.tokens + cute.assume(places[word // 2 % 2] + word * 16, divby=16)
                row = load_words(cute.make_tensor(cute.recast_ptr(place, dtype=Uint32), cute.make_layout(4)))
                pairs = [float16_pairs(words[word]) for words in codes]
                for step in range(2):
                    weights = [pairs[r][2 * step + high] for high in range(2) for r in range(2)]
                    total = ptx.mma_16x8x16(weights, row[2 * step : 2 * step + 2], total, "f16")
            for e in range(4):
                sums[e] = ptx.fma_rn(total[e], scales[e // 2][2 * half + e % 2], sums[e])
            if half == 0:
                smem.weight_pipeline.release(stage, consumer.leads)
        cute.arch.sync_warp()
        smem.a_pipeline.arrive_empty(token_stage, consumer.leads)
        return self._after(stages)

    def _scales(self, scales_at: cute.Pointer, stage, row, quad, existing) -> list:
        """The scales of a lane's four blocks of a row, in fp32."""
        bytes_ = self.ring.scales(scales_at, stage, row, quad, existing)
        pairs = [ptx.f16x2_of_e4m3x2(half) for half in (bytes_ & Uint32(0xFFFF), bytes_ >> 16)]
        return [ptx.unpack_f16(pair, half) for pair in pairs for half in range(2)]

    def _factors(self, at: cute.Pointer) -> list:
        words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(4)))
        return [ptx.float_of(word) for word in words]

    def add_up(self, sums) -> None:
        """Add up the columns: then every lane of a quad has the totals of both rows, in ``sums[0]`` and ``sums[2]``."""
        for i in (0, 2):
            total = ptx.add_rn(sums[i], sums[i + 1])
            for step in (1, 2):
                total = ptx.add_rn(total, cute.arch.shuffle_sync_bfly(total, step))
            sums[i] = total
