"""MMAs of a warp with FP4 codes of both operands (block-scaled ``mma.sync``), and the layout of activations for them.

Nothing is decoded: the MMA applies the scales. A *step* is an MMA with K = 64 that multiplies 16 rows of the weight by
eight tokens. Codes stay in their memory order, and ``ldmatrix`` distributes them among the lanes.

A token's k tile is contiguous (``ActivationLayout.token_bytes``): the codes, then the scales of their blocks in the
order of k, then padding up to 16 bytes of scales. MMAs do not use the padding. Elements beyond K have codes and scales
of zero. The size is an odd multiple of 16 bytes, so ``ldmatrix`` reads the same 16 bytes of eight consecutive tokens
without bank conflicts.
"""

from typing import Final

import cutlass.cute as cute
import cutlass.experimental.primitives as primitives
from cutlass import Int32, Int64, Uint8, Uint16, Uint32

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.formats.scale_layout import TILE_BLOCKS
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import load_words, store_words
from torch_cute_ops.kernels.common.fp4.activations import code_arguments
from torch_cute_ops.kernels.common.fp4.layouts import ATOM_M, CODE_MMA_K, ActivationLayout
from torch_cute_ops.kernels.common.fp4.weight import WeightStages
from torch_cute_ops.runtime.argspec import TensorArg

GROUP: Final = 32  # number of elements that a thread copies: 16 bytes of codes
VECTOR: Final = 16  # bytes of a row of a matrix that ldmatrix loads


class CodeActivations:
    """Device code that copies FP4 activations and their scales into the layout of this module. A thread handles one k
    group (32 elements) of one token at a time.

    The methods correspond to the methods of ``activations.Activations``.

    Attributes:
        config: formats of the activations, before and after they are copied.
        k_groups: number of k groups of a k tile.
        blocks: number of blocks of a k group.
    """

    def __init__(self, config: ActivationLayout):
        self.config = config
        self.k_groups = config.k_tile // GROUP
        self.blocks = GROUP // config.fmt.block_size

    def arguments(self) -> tuple[TensorArg, TensorArg]:
        """Return descriptions of two arguments: the matrix of codes, and its scales."""
        return code_arguments(self.config)

    def read(self, a, scale, token, start, left, k_group) -> list:
        """Load a k group: four words of codes, and one word with the scales of the group's blocks.

        Args:
            a, scale: codes, and their scales.
            token: row of the matrix.
            start: first element of the k tile.
            left: number of elements from ``start`` to the end of the token's range of k. Groups beyond this range are
                returned as zero.
            k_group: index of the k group.
        """
        layout, size = self.config.layout, self.config.fmt.block_size
        first = start + k_group * GROUP
        exists = k_group * GROUP < left
        at = a.iterator + cute.assume(Int64(token) * a.shape[1] + first // 2, divby=VECTOR)
        place = layout.row_offset(Int64(token), a.shape[1] * 2 // size) + layout.block_offset(first // size)
        byte_at = cute.recast_ptr(scale.iterator, dtype=Uint8) + place
        scales = Uint32(0)
        # The address of a linear scale may be odd, so load single bytes.
        for i in range(self.blocks):
            scales = scales | ptx.load_narrow_if(byte_at, exists, 1, i) << Uint32(8 * i)
        return [*ptx.load_if(at, exists, 4), scales]

    def store(self, words: list, groups, k_group, token, base: cute.Pointer) -> None:
        """Store a k group that ``read`` loaded, for the ``token``-th token after ``base``. ``groups`` is not used."""
        self.store_row(words, k_group, base + cute.assume(token * self.config.token_bytes, divby=VECTOR))

    def store_row(self, words: list, k_group, base: cute.Pointer) -> None:
        """Store a k group that ``read`` loaded, in the k tile of a token that begins at ``base``."""
        *codes, scales = words
        codes_at = cute.recast_ptr(base + cute.assume(k_group * VECTOR, divby=VECTOR), dtype=Uint32)
        store_words(codes, cute.make_tensor(codes_at, cute.make_layout(4)))
        dtype = {1: Uint8, 2: Uint16}[self.blocks]
        place = self.config.k_tile // 2 + cute.assume(k_group * self.blocks, divby=self.blocks)
        cute.make_tensor(cute.recast_ptr(base + place, dtype=dtype), cute.make_layout(1))[0] = dtype(scales)


class CodeTileMma:
    """MMAs of a warp, one k tile at a time: 16 rows of a weight times ``tile_m`` tokens.

    Both operands are in shared memory, in stages. ``WeightStages`` describes the stages of the weight, and the module's
    docstring describes tokens. The methods correspond to the methods of ``mma.KTileMma``.

    Attributes:
        pitch: distance in bytes between neighbouring tokens of a stage.
        steps: number of steps of a k tile.
        step_blocks: number of blocks of a step.
        last_blocks: number of blocks of a row in its last k tile if this k tile is not full, else None.
    """

    def __init__(self, weight: WeightStages, arranged: ActivationLayout, tile_m: int, k: int):
        self.weight, self.tile_m, self.pitch = weight, tile_m, arranged.token_bytes
        self.row_bytes = arranged.k_tile // 2
        self.steps, self.step_blocks = arranged.k_tile // CODE_MMA_K, CODE_MMA_K // weight.fmt.block_size
        self.last_blocks = k // weight.fmt.block_size if k % arranged.k_tile else None

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations of a stage."""
        return self.tile_m * self.pitch

    def start_of(self, activations: cute.Pointer) -> None:
        """Return None, because no warpgroup multiplies: only wgmma needs a start function."""

    def multiply(
        self, start, part, parts: int, k_tile, stage, adds, rows, lane, acc, smem, free_before, phase=None
    ) -> None:
        """Multiply a k tile, or one of ``parts`` ranges of it, and add to the accumulators. A range consists of whole
        steps. ``part`` may be a run-time value.

        ``KTileMma.multiply`` describes the arguments. ``start``, ``adds`` and ``free_before`` are not used.
        """
        count = self.steps // parts
        first = part * count
        left = None if self.last_blocks is None else self.last_blocks - k_tile * self.weight.blocks
        codes = self._codes_of_lane(smem.codes, rows, lane)
        scales = self._scales_of_lane(smem.scales, rows, lane)
        tokens = smem.activations + cute.assume(stage * self.activation_bytes, divby=VECTOR)
        of_tokens = [
            self._token_scales(tokens, group * ATOM_M + lane // 4, first, count)
            for group in range(self.tile_m // ATOM_M)
        ]
        for begin in range(0, count, 2):
            together = range(min(2, count - begin))  # steps for which a token's codes are loaded at once
            weights, factors = [], []
            for i in together:
                step = first + begin + i
                weights.append(_matrices(codes(step), 4))
                factors.append(self._weight_scales(scales, step, left, phase))
            for group in range(self.tile_m // ATOM_M):
                row = group * ATOM_M + lane % 8
                vector = (first + begin) * 2 + lane // 8 % (2 * len(together))
                place = row * self.pitch + vector * VECTOR
                loaded = _matrices(tokens + cute.assume(place, divby=VECTOR), 2 * len(together))
                total = [acc[4 * group + i] for i in range(4)]
                for i in together:
                    words, factor = loaded[2 * i : 2 * i + 2], of_tokens[group][begin + i]
                    nvfp4 = self.weight.fmt == NVFP4
                    total = ptx.mma_16x8x64(weights[i], words, total, factors[i], factor, nvfp4)
                for i, value in enumerate(total):
                    acc[4 * group + i] = value

    def _codes_of_lane(self, codes_at: cute.Pointer, rows, lane):
        """Return a function that returns the address of 16 bytes of a row's codes for a step.

        ``ldmatrix`` loads four matrices of eight rows x 16 bytes: rows 0 to 7, rows 8 to 15, and then the same rows in
        the second half of the step. Lane ``l`` gives the address of row ``l % 8`` of matrix ``l // 8``.
        """
        is_second = lane // 8 % 2 == 1
        stage, row = (_select(is_second, rows[1][i], rows[0][i]) for i in range(2))
        row = row - lane // 4 + lane % 8

        def address(step) -> cute.Pointer:
            return self.weight.vector_at(codes_at, stage, row, step * 2 + lane // 16)

        return address

    def _scales_of_lane(self, scales_at: cute.Pointer, rows, lane) -> cute.Pointer:
        """Return the address of the scales of a lane's row. Even lanes hold the scales of the first of their two rows,
        odd lanes the scales of the second."""
        is_second = lane % 2 == 1
        stage, row = (_select(is_second, rows[1][i], rows[0][i]) for i in (0, 2))
        weight = self.weight
        place = stage * weight.scale_bytes + weight.layout.row_offset(row, weight.scale_columns)
        return scales_at + cute.assume(place, divby=TILE_BLOCKS)

    def _weight_scales(self, scales_at: cute.Pointer, step, left, phase) -> Uint32:
        """Load the scales of a lane's row for a step. ``left`` is the number of existing blocks from the first block of
        the k tile on, or None if all blocks exist."""
        block = step * self.step_blocks
        column = block if phase is None else block + phase * (TILE_BLOCKS // 2)
        at = scales_at + cute.assume(self.weight.layout.block_offset(column), divby=self.step_blocks)
        dtype = {4: Uint32, 2: Uint16}[self.step_blocks]
        word = Uint32(cute.make_tensor(cute.recast_ptr(at, dtype=dtype), cute.make_layout(1))[0])
        return word if left is None else existing_scales(word, left - block, self.step_blocks)

    def _token_scales(self, tokens: cute.Pointer, token, first, count: int) -> list:
        """Load the scales of a token for ``count`` steps, beginning with step ``first``. Each word of the result holds
        the scales of a step in its low bytes."""
        size = count * self.step_blocks
        place = token * self.pitch + self.row_bytes + first * self.step_blocks
        at = tokens + cute.assume(place, divby=size)
        if size < 4:
            return [Uint32(cute.make_tensor(cute.recast_ptr(at, dtype=Uint16), cute.make_layout(1))[0])]
        words = load_words(cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(size // 4)))
        if self.step_blocks == 4:
            return words
        return [word >> Uint32(shift) if shift else word for word in words for shift in (0, 16)]


def existing_scales(word: Uint32, left, count: int) -> Uint32:
    """Replace the scales of missing blocks by zero, because they may be NaN, and 0 times NaN is not 0.

    Args:
        word: scales of one row for an MMA, in the low bytes.
        left: number of blocks from the MMA's first block to the end of the row.
        count: number of blocks of the MMA.
    """
    # k is a multiple of 32. So an MMA of 64 elements may end after half of its blocks: two NVFP4 blocks, or one MXFP4
    # block.
    half = Uint32(0xFFFF if count == 4 else 0xFF)
    word = ptx.select(left >= count, word, word & half)
    return ptx.select(left > 0, word, Uint32(0))


def _matrices(at: cute.Pointer, count: int) -> list:
    """Load ``count`` matrices of eight rows x 16 bytes. Each lane gives the address of one row."""
    loaded = primitives.ldmatrix(at.to_llvm_ptr(), count, primitives.MMALayout.ROW)
    return [Uint32(loaded[i]) for i in range(count)]


def _select(condition, a, b):
    """Return ``a if condition else b`` for integers, which may be constants."""
    return ptx.select(condition, Int32(a), Int32(b))
