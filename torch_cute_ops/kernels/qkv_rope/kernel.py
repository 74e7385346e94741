"""Device code that normalises and rotates heads and writes caches. The package's docstring describes roles and data
path."""

from functools import reduce
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Constexpr, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from torch_cute_ops.formats import NVFP4
from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.launch import ctas_unless_overlapping, pdl_start
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES, pack, store_byte, store_words, unpack
from torch_cute_ops.kernels.common.fp4.codes import fp4_block
from torch_cute_ops.kernels.common.fp8.encode import divide_e4m3, scale_divisor
from torch_cute_ops.kernels.common.fp8.layouts import FP8_UNIT
from torch_cute_ops.kernels.qkv_rope.config import VECTOR, WARP, Arguments, Config
from torch_cute_ops.kernels.qkv_rope.overlap import ctas_if_caches_are_apart
from torch_cute_ops.runtime.argspec import Dim, ScalarArg, TensorArg

FP8 = torch.float8_e4m3fn
INTEGERS = {torch.int32: "Int32", torch.int64: "Int64"}


@dsl_user_op
def sqrt_rn(a, *, loc=None, ip=None) -> Float32:
    """Return the square root of ``a``, rounded to nearest even."""
    operands = [Float32(a).ir_value(loc=loc, ip=ip)]
    text = "sqrt.rn.f32 $0, $1;"
    return Float32(llvm.inline_asm(T.f32(), operands, text, "=f,f", has_side_effects=False, loc=loc, ip=ip))


class Inputs(NamedTuple):
    """Tensors that the kernel reads for each row: ``Arguments`` describes them."""

    qkv: cute.Tensor
    cos_sin: cute.Tensor
    positions: cute.Tensor
    slots: cute.Tensor


class Target(NamedTuple):
    """Tensors to which the heads of q, k or v are written.

    Attributes:
        data: q (M, heads, D), or a cache (blocks, page, heads, ...).
        block_scale: block scales of an NVFP4 cache, or None.
        scale: scale by which heads are divided, or None.
    """

    data: cute.Tensor
    block_scale: cute.Tensor | None
    scale: cute.Tensor | None


class Lane(NamedTuple):
    """Place of a lane.

    Attributes:
        lane: index of the lane in its warp.
        head: index, among the heads that the warp's lanes hold side by side, of the lane's head.
        vector: index of the lane's vector in the head. Lanes with an index of ``vectors`` or more hold zeros.
    """

    lane: Int32
    head: Int32
    vector: Int32


class Angles(NamedTuple):
    """Cosines and sines for the elements of a lane.

    Attributes:
        cos: cosine of each element, or of each pair if pairs are interleaved.
        sin: sines. If pairs are not interleaved, the sine of an element in the first half is negated.
    """

    cos: list
    sin: list


class QkvRopeKernel:
    """Kernel that normalises and rotates heads and writes caches, compiled for a ``Config``."""

    def __init__(self, config: Config):
        self.config = config
        self.dtype = DSL_DTYPES[config.spec.dtype]
        self.table_dtype = DSL_DTYPES[config.spec.table_dtype]

    def arguments(self) -> Arguments:
        spec = self.config.spec
        tokens, blocks, page = Dim("tokens"), Dim("blocks"), Dim("page")
        dim, heads = spec.head_dim, spec.kv_heads
        width = (spec.q_heads + 2 * heads) * dim
        row = Dim("row_stride", divisibility=VECTOR, bits=64)
        table_row = Dim("table_stride", divisibility=spec.table_align // spec.table_dtype.itemsize, bits=64)

        def vector(dtype: str, count: Dim | int, align: int) -> TensorArg:
            return TensorArg(dtype, (count,), (1,), align)

        def cache(name: str, dtype: torch.dtype) -> TensorArg:
            unit = VECTOR // 2 if dtype == torch.uint8 else VECTOR
            steps = tuple(Dim(f"{name}_{each}_stride", unit, 64) for each in ("block", "slot", "head"))
            shape = (blocks, page, heads, dim * unit // VECTOR)
            return TensorArg(DSL_DTYPES[dtype].__name__, shape, (*steps, 1), unit * dtype.itemsize)

        def block_scale(name: str, dtype: torch.dtype) -> TensorArg | None:
            if dtype != torch.uint8:
                return None
            steps = tuple(Dim(f"{name}_{each}_stride", bits=64) for each in ("block", "slot", "head", "scale"))
            return TensorArg("Float8E4M3FN", (blocks, page, heads, dim // NVFP4.block_size), steps, 1)

        def norm(dtype: torch.dtype | None) -> TensorArg | None:
            return None if dtype is None else vector(DSL_DTYPES[dtype].__name__, dim, 16)

        def scale(name: str, is_given: bool) -> TensorArg | None:
            return vector("Float32", Dim(f"{name}_scales"), 4) if is_given else None

        return Arguments(
            qkv=TensorArg(self.dtype.__name__, (tokens, width), (row, 1), 16),
            cos_sin=TensorArg(
                self.table_dtype.__name__, (Dim("positions"), spec.rotary_dim), (table_row, 1), spec.table_align
            ),
            positions=vector(INTEGERS[spec.position_dtype], tokens, spec.position_dtype.itemsize),
            key_cache=cache("key", spec.key_dtype),
            value_cache=cache("value", spec.value_dtype),
            slots=vector(INTEGERS[spec.slot_dtype], Dim("slots"), spec.slot_dtype.itemsize),
            q_norm=norm(spec.q_norm_dtype),
            k_norm=norm(spec.k_norm_dtype),
            q_scale=scale("q", spec.has_q_scale),
            k_scale=scale("k", spec.has_k_scale),
            v_scale=scale("v", spec.has_v_scale),
            key_block_scale=block_scale("key_scale", spec.key_dtype),
            value_block_scale=block_scale("value_scale", spec.value_dtype),
            q=TensorArg(
                DSL_DTYPES[spec.q_dtype].__name__, (tokens, spec.q_heads, dim), (spec.q_heads * dim, dim, 1), 16
            ),
            eps=ScalarArg("Float32"),
        )

    @cute.jit
    def __call__(
        self,
        qkv,
        cos_sin,
        positions,
        key_cache,
        value_cache,
        slots,
        q_norm,
        k_norm,
        q_scale,
        k_scale,
        v_scale,
        key_block_scale,
        value_block_scale,
        q,
        eps: Float32,
        stream,
    ):
        c = self.config
        caches = (key_cache, value_cache, key_block_scale, value_block_scale)
        read = (qkv, cos_sin, positions, slots, q_norm, k_norm, q_scale, k_scale, v_scale)
        tokens = qkv.shape[0]
        # Check one cache at a time against the inputs, because caches may alternate in memory.
        is_good = ctas_if_caches_are_apart(Int32(1), *caches)
        is_good = ctas_unless_overlapping(is_good, (q,), (*read, *caches))
        for cache in caches:
            if const_expr(cache is not None):
                is_good = ctas_unless_overlapping(is_good, (cache,), read)
        given = (qkv, cos_sin, positions, slots, q_norm, k_norm)
        targets = (q, q_scale, key_cache, key_block_scale, k_scale, value_cache, value_block_scale, v_scale)
        if tokens <= c.few:
            self._launch(True, is_good, tokens, given, targets, eps, stream)
        else:
            self._launch(False, is_good, tokens, given, targets, eps, stream)

    @cute.jit
    def _launch(self, are_few: Constexpr, is_good, tokens, given, targets, eps, stream):
        c = self.config
        warps = Int64(tokens) * c.division(are_few).warps
        ctas = is_good * Int32((warps + (c.threads // WARP - 1)) // (c.threads // WARP))
        self.kernel(are_few, *given, *targets, eps).launch(
            grid=[ctas, 1, 1],
            block=[c.threads, 1, 1],
            max_number_threads=[c.threads, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=c.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        are_few: Constexpr,
        qkv,
        cos_sin,
        positions,
        slots,
        q_norm,
        k_norm,
        q,
        q_scale,
        key_cache,
        key_block_scale,
        k_scale,
        value_cache,
        value_block_scale,
        v_scale,
        eps: Float32,
    ):
        """Let each warp process some neighbouring heads of q, k or v of one row."""
        c = self.config
        division = c.division(are_few)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        pdl_start(c.pdl)
        warp = cta * (c.threads // WARP) + cute.arch.make_warp_uniform(tid // WARP)
        token, part = warp // division.warps, warp % division.warps
        lane = Lane(tid % WARP, tid % WARP // c.spec.lanes, tid % c.spec.lanes)
        inputs = Inputs(qkv, cos_sin, positions, slots)
        if token < qkv.shape[0]:
            if part < division.q_warps:
                target = Target(q, None, q_scale)
                self._process("q", division.q_at_once, part, token, lane, inputs, q_norm, target, eps)
            else:
                if token < slots.shape[0]:
                    part = part - division.q_warps
                    if part < division.kv_warps:
                        target = Target(key_cache, key_block_scale, k_scale)
                        self._process("k", division.kv_at_once, part, token, lane, inputs, k_norm, target, eps)
                    else:
                        part = part - division.kv_warps
                        target = Target(value_cache, value_block_scale, v_scale)
                        self._process("v", division.kv_at_once, part, token, lane, inputs, None, target, eps)

    @cute.jit
    def _process(
        self,
        kind: Constexpr,
        at_once: Constexpr,
        part,
        token,
        lane: Lane,
        inputs: Inputs,
        norm,
        target: Target,
        eps,
    ):
        """Process the heads of ``part``, ``at_once`` heads per lane."""
        spec = self.config.spec
        # Load everything before anything is used: position, slot, heads, then the angles, which depend on the position.
        position, slot = None, None
        if const_expr(kind != "v"):
            position = Int64(inputs.positions[token])
        if const_expr(kind != "q"):
            slot = Int64(inputs.slots[token])
        first = part * (at_once * spec.heads_per_warp) + lane.head
        heads = [first + i * spec.heads_per_warp for i in range(at_once)]
        exist = [(head < spec.heads(kind)) & (lane.vector < spec.vectors) for head in heads]
        words = [
            ptx.load_if(
                self._source(inputs.qkv, token, spec.first_head(kind) + head, lane), exists, VECTOR // 2, past_l1=True
            )
            for head, exists in zip(heads, exist, strict=True)
        ]
        weight = None
        if const_expr(norm is not None):
            weight = self._weight(norm, spec.norm_dtype(kind), lane)
        angles = None
        if const_expr(kind != "v"):
            angles = self._angles(inputs.cos_sin, position, lane)
        for i in range_constexpr(at_once):
            values = unpack(words[i], self.dtype)
            if const_expr(norm is not None):
                values = self._normalised(values, weight, eps)
            if const_expr(kind != "v"):
                if const_expr(spec.interleaved):
                    values = self._rotated_neighbours(values, angles, lane)
                else:
                    values = self._rotated_halves(values, angles, lane)
            self._store(kind, values, heads[i], exist[i], token, slot, lane, target)

    # Loads

    def _source(self, qkv: cute.Tensor, token, head, lane: Lane) -> cute.Pointer:
        """Return the address of the lane's vector of a head of a row."""
        start = qkv.iterator + cute.assume(Int64(token) * qkv.stride[0], divby=VECTOR)
        return start + cute.assume(head * self.config.spec.head_dim + lane.vector * VECTOR, divby=VECTOR)

    def _weight(self, norm: cute.Tensor, dtype: torch.dtype, lane: Lane) -> list:
        """Return the lane's weights of the RMSNorm, plus 1 if the configuration says so."""
        spec = self.config.spec
        at = norm.iterator + cute.assume(lane.vector * VECTOR, divby=VECTOR)
        words = []
        for i in range(0, VECTOR * dtype.itemsize, 16):
            words += ptx.load_if(at, lane.vector < spec.vectors, 4, i)
        weight = unpack(words, DSL_DTYPES[dtype])
        return [ptx.add_rn(each, Float32(1.0)) for each in weight] if spec.norm_plus_one else weight

    def _angles(self, table: cute.Tensor, position, lane: Lane) -> Angles:
        """Return the cosines and sines of the lane's elements. The values are NaN if the position is out of range."""
        spec = self.config.spec
        exists = (position >= 0) & (position < table.shape[0])
        row = table.iterator + cute.assume(
            ptx.select(exists, position, Int64(0)) * table.stride[0],
            divby=spec.table_align // spec.table_dtype.itemsize,
        )
        both = []
        for half in range(2):
            if spec.has_table_vectors:
                values = self._adjacent_angles(row, half, exists, lane)
            else:
                values = [self._angle(row, half, i, exists, lane) for i in range(spec.lane_pairs)]
            both.append([ptx.select(exists, value, Float32(float("nan"))) for value in values])
        cos, sin = both
        if not spec.interleaved:
            sin = [ptx.select(self._is_below(spec.pairs, i, lane), -value, value) for i, value in enumerate(sin)]
        return Angles(cos, sin)

    def _adjacent_angles(self, row: cute.Pointer, half: int, exists, lane: Lane) -> list:
        """Return the lane's cosines (``half`` is 0) or sines (1), with vector loads."""
        spec = self.config.spec
        first = lane.vector * spec.lane_pairs
        exists = exists & (lane.vector * VECTOR < spec.rotary_dim)
        if not spec.interleaved:
            first = ptx.select(first < spec.pairs, first, first - spec.pairs)
        at = row + cute.assume(first + half * spec.pairs, divby=spec.lane_pairs)
        size = spec.lane_pairs * spec.table_dtype.itemsize
        words = []
        for i in range(0, size, 16):
            words += ptx.load_if(at, exists, min(size, 16) // 4, i)
        return unpack(words, self.table_dtype)

    def _angle(self, row: cute.Pointer, half: int, i: int, exists, lane: Lane) -> Float32:
        """Return the lane's i-th cosine (``half`` is 0) or sine (1). A load reads the word that contains it."""
        spec = self.config.spec
        pair = lane.vector * spec.lane_pairs + i
        if spec.interleaved:
            exists = exists & (pair < spec.pairs)
        else:
            exists = exists & (pair < spec.rotary_dim)
            pair = ptx.select(pair < spec.pairs, pair, pair - spec.pairs)
        index = pair + half * spec.pairs
        per_word = 4 // spec.table_dtype.itemsize
        (word,) = ptx.load_if(row + cute.assume(index // per_word * per_word, divby=per_word), exists, 1)
        if per_word == 1:
            return ptx.float_of(word)
        word = ptx.select(index % 2 == 0, word, word >> 16)
        return unpack([word], self.table_dtype)[0]

    # Arithmetic

    def _normalised(self, values: list, weight: list, eps) -> list:
        """RMS-normalise a head. The squares are added as a balanced binary tree over the elements of the head."""
        spec = self.config.spec
        sums = [ptx.mul_rn(value, value) for value in values]
        while len(sums) > 1:
            sums = [ptx.add_rn(a, b) for a, b in zip(sums[0::2], sums[1::2], strict=True)]
        (total,) = sums
        offset = 1
        while offset < spec.lanes:
            total = ptx.add_rn(total, cute.arch.shuffle_sync_bfly(total, offset=offset))
            offset *= 2
        mean = ptx.add_rn(ptx.mul_rn(total, Float32(1.0 / spec.head_dim)), eps)
        rstd = ptx.div_rn(Float32(1.0), sqrt_rn(mean))
        return [ptx.mul_rn(ptx.mul_rn(value, rstd), factor) for value, factor in zip(values, weight, strict=True)]

    def _is_below(self, limit: int, i: int, lane: Lane):
        """Return True if the index in the head of the lane's i-th element is below ``limit``."""
        # If the limit is a multiple of a vector, all elements of a vector are on the same side of the limit.
        return lane.vector * VECTOR + (0 if limit % VECTOR == 0 else i) < limit

    def _if_rotated(self, i: int, rotated, value, lane: Lane):
        """Return ``rotated`` if the lane's i-th element is among the rotated elements, otherwise ``value``."""
        spec = self.config.spec
        if spec.rotary_dim == spec.head_dim:
            return rotated
        return ptx.select(self._is_below(spec.rotary_dim, i, lane), rotated, value)

    def _rotated_neighbours(self, values: list, angles: Angles, lane: Lane) -> list:
        """Rotate pairs of neighbouring elements."""
        result = []
        for pair, (cos, sin) in enumerate(zip(*angles, strict=True)):
            a, b = values[2 * pair : 2 * pair + 2]
            turned = (_product_sum(a, cos, b, -sin), _product_sum(b, cos, a, sin))
            result += [self._if_rotated(2 * pair, x, value, lane) for x, value in zip(turned, (a, b), strict=True)]
        return result

    def _rotated_halves(self, values: list, angles: Angles, lane: Lane) -> list:
        """Rotate pairs (i, i + pairs). A lane receives the other elements of its pairs from the lane ``pairs / VECTOR``
        lanes before or after it, or from two lanes if ``pairs`` is not a multiple of ``VECTOR``."""
        spec = self.config.spec
        step, shift = divmod(spec.pairs, VECTOR)
        result = []
        for i, value in enumerate(values):
            is_first = self._is_below(spec.pairs, i, lane)
            carry, above = divmod(i + shift, VECTOR)
            borrow, below = divmod(i - shift, VECTOR)
            from_above, from_below = lane.lane + (step + carry), lane.lane - (step - borrow)
            if above == below:
                source = ptx.select(is_first, from_above, from_below)
                other = cute.arch.shuffle_sync(values[above], source)
            else:
                others = [
                    cute.arch.shuffle_sync(values[element], source)
                    for element, source in ((above, from_above), (below, from_below))
                ]
                other = ptx.select(is_first, *others)
            # The sine of an element in the first half is negated.
            rotated = _product_sum(value, angles.cos[i], other, angles.sin[i])
            result.append(self._if_rotated(i, rotated, value, lane))
        return result

    # Stores

    @cute.jit
    def _store(self, kind: Constexpr, values: list, head, exists, token, slot, lane: Lane, target: Target):
        """Convert the lane's vector of a head, and store it in q, or in a slot of a cache."""
        spec = self.config.spec
        dtype = spec.stored_dtype(kind)
        data, block_scale = target.data, target.block_scale
        per_vector = VECTOR // 2 if dtype == torch.uint8 else VECTOR
        column = cute.assume(lane.vector * per_vector, divby=per_vector)
        scale = None
        if const_expr(target.scale is not None):
            index = ptx.select(Int32(target.scale.shape[0]) > 1, cutlass.min(head, spec.heads(kind) - 1), Int32(0))
            scale = target.scale[index]
        if const_expr(kind == "q"):
            row = Int64(token) * (spec.q_heads * spec.head_dim) + head * spec.head_dim
            at = data.iterator + cute.assume(row, divby=VECTOR) + column
            self._store_vector(self._encoded(values, dtype, scale), at, exists)
        else:
            count = Int64(data.shape[0]) * data.shape[1]
            is_written = (slot >= 0) & (slot < count) & exists
            # A valid slot fits into 32 bits, and division is much faster in 32 bits than in 64 bits.
            place = Uint32(ptx.select(is_written, slot, Int64(0)).to(Int32))
            page = Uint32(data.shape[1])
            block, in_block = Int64(place // page), Int64(place % page)
            start = block * data.stride[0] + in_block * data.stride[1] + Int64(head) * data.stride[2]
            at = data.iterator + cute.assume(start, divby=per_vector) + column
            if const_expr(dtype == torch.uint8):
                (word,), byte = self._fp4(values, scale)
                self._store_vector([word], at, is_written)
                steps = block_scale.stride
                start = block * steps[0] + in_block * steps[1] + Int64(head) * steps[2]
                start = start + Int64(lane.vector // 2) * steps[3]
                if is_written & (lane.vector % 2 == 0):
                    bytes_ = cute.recast_ptr(block_scale.iterator, dtype=Uint8)
                    store_byte(cute.make_tensor(bytes_ + start, cute.make_layout(1)), byte)
            else:
                self._store_vector(self._encoded(values, dtype, scale), at, is_written)

    @cute.jit
    def _store_vector(self, words: list, at: cute.Pointer, condition):
        """Store one, two or four words if ``condition``."""
        if const_expr(len(words) == 4):
            ptx.store_if(at, words, condition)
        else:
            if condition:
                to = cute.make_tensor(cute.recast_ptr(at, dtype=Uint32), cute.make_layout(len(words)))
                store_words(words, to)

    def _encoded(self, values: list, dtype: torch.dtype, scale) -> list:
        """Return the values as words of ``dtype``, 16-bit or FP8, divided by ``scale`` unless it is None."""
        if dtype != FP8:
            return pack(values, self.dtype)
        if scale is None:
            return [ptx.e4m3x4_of(tuple(values[i : i + 4])) for i in range(0, VECTOR, 4)]
        # ``divide_e4m3`` takes 16 values. The compiler drops the instructions for the zeros.
        padded = [*values, *[Float32(0.0)] * (FP8_UNIT - VECTOR)]
        return divide_e4m3(padded, scale_divisor(scale, None, is_dynamic=False))[: VECTOR // 4]

    def _fp4(self, values: list, scale) -> tuple[list, Uint32]:
        """Return the codes of the lane's half of an NVFP4 block as a word, and the scale byte of the block."""
        amax = reduce(ptx.max_abs_nan, values, Float32(0.0))
        amax = ptx.max_abs_nan(amax, cute.arch.shuffle_sync_bfly(amax, offset=1))
        encode = None if scale is None else ptx.div_rn(Float32(1.0), scale)
        return fp4_block(values, amax, encode, NVFP4, self.config.has_e2m1_cvt, part=VECTOR)


def _product_sum(a, b, c, d) -> Float32:
    """Return ``a · b + c · d``; both products and the sum are rounded."""
    return ptx.add_rn(ptx.mul_rn(a, b), ptx.mul_rn(c, d))
