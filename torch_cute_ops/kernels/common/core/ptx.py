"""PTX instructions that the DSL lacks, or that it offers only with side effects.

The functions for arithmetic have no side effects, so the compiler may merge, move and drop the instructions.
"""

import cutlass.experimental.primitives as primitives
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector
from cutlass.cutlass_dsl import T, dsl_user_op

EVICT_FIRST = 0x12F0000000000000
"""Cache policy ``L2::evict_first`` (createpolicy), for data that is read once, so that other data stays in L2."""


def _asm(result: ir.Type, operands: list, text: str, constraints: str, loc, ip, pure: bool = False) -> ir.Value:
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=not pure, loc=loc, ip=ip)


def _f32(value, loc, ip) -> ir.Value:
    return Float32(value).ir_value(loc=loc, ip=ip)


def _u32(value, loc, ip) -> ir.Value:
    return Uint32(value).ir_value(loc=loc, ip=ip)


def _pure(result: type, text: str, given: type, *values, loc, ip):
    """Apply an instruction without side effects to ``values``. ``result`` and ``given`` are the types of the result and
    of the values: ``Uint32`` or ``Float32``."""
    letters = {Uint32: "r", Float32: "f"}
    operands = [given(value).ir_value(loc=loc, ip=ip) for value in values]
    constraints = f"={letters[result]}" + f",{letters[given]}" * len(values)
    return result(_asm(result.mlir_type, operands, text, constraints, loc, ip, pure=True))


@dsl_user_op
def prmt(a, b, selector: int, *, loc=None, ip=None) -> Uint32:
    """Select four bytes from ``a`` (bytes 0..3) and ``b`` (bytes 4..7). Each nibble of ``selector`` is the index of a
    byte."""
    return _pure(Uint32, f"prmt.b32 $0, $1, $2, {selector:#x};", Uint32, a, b, loc=loc, ip=ip)


@dsl_user_op
def prmt_by(a, b, selectors, *, loc=None, ip=None) -> Uint32:
    """Select four bytes of ``a`` and ``b``, as ``prmt`` does, but with run-time selectors: the four low nibbles of the
    word ``selectors``."""
    return _pure(Uint32, "prmt.b32 $0, $1, $2, $3;", Uint32, a, b, selectors, loc=loc, ip=ip)


@dsl_user_op
def xor_masked(a, b, mask: int, *, loc=None, ip=None) -> Uint32:
    """Return ``a ^ (b & mask)``."""
    return _pure(Uint32, f"lop3.b32 $0, $1, $2, {mask:#x}, 0x78;", Uint32, a, b, loc=loc, ip=ip)


@dsl_user_op
def select_bits(mask, a, b, *, loc=None, ip=None) -> Uint32:
    """Return the bits of ``a`` where ``mask`` is set, and the bits of ``b`` elsewhere."""
    return _pure(Uint32, "lop3.b32 $0, $1, $2, $3, 0xca;", Uint32, mask, a, b, loc=loc, ip=ip)


@dsl_user_op
def shift_left(a, count: int, *, loc=None, ip=None) -> Uint32:
    """Return ``a << count``. The compiler may move an ordinary shift ahead of a mask, but it cannot move this shift."""
    return _pure(Uint32, f"shl.b32 $0, $1, {count};", Uint32, a, loc=loc, ip=ip)


@dsl_user_op
def opaque(value, *, loc=None, ip=None) -> Int32:
    """Return ``value``, but hide from the compiler that it is unchanged. The compiler then cannot hoist computations
    that depend on it out of an enclosing loop."""
    return Int32(_asm(T.i32(), [Int32(value).ir_value(loc=loc, ip=ip)], "mov.b32 $0, $1;", "=r,r", loc, ip))


@dsl_user_op
def load_vector(pointer, count: int, after: int = 0, *, loc=None, ip=None) -> list:
    """Load ``count`` words at ``pointer + after``, an address that is a multiple of the words' total size."""
    at = (pointer + after if after else pointer).to_llvm_ptr(loc=loc, ip=ip)
    if count == 1:
        return [Uint32(llvm.load(T.i32(), at, alignment=4, loc=loc, ip=ip))]
    loaded = llvm.load(ir.VectorType.get([count], T.i32()), at, alignment=4 * count, loc=loc, ip=ip)
    return [Uint32(vector.extract(loaded, [], [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def store_vector(pointer, words: list, after: int = 0, *, loc=None, ip=None) -> None:
    """Store words at ``pointer + after``, an address that is a multiple of the words' total size."""
    values, vector_type = [_u32(word, loc, ip) for word in words], ir.VectorType.get([len(words)], T.i32())
    value = values[0] if len(values) == 1 else vector.from_elements(vector_type, values, loc=loc, ip=ip)
    at = (pointer + after if after else pointer).to_llvm_ptr(loc=loc, ip=ip)
    llvm.store(value, at, alignment=4 * len(values), loc=loc, ip=ip)


@dsl_user_op
def select(condition, a, b, *, loc=None, ip=None):
    """Return ``a if condition else b`` without a branch. Both values are computed, and must have the same type."""
    operands = [value.ir_value(loc=loc, ip=ip) for value in (Boolean(condition), a, b)]
    return type(a)(arith.select(*operands, loc=loc, ip=ip))


@dsl_user_op
def bits_of(value, *, loc=None, ip=None) -> Uint32:
    """Return the bit pattern of a ``Float32``."""
    return Uint32(llvm.bitcast(T.i32(), _f32(value, loc, ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(bits, *, loc=None, ip=None) -> Float32:
    """Return the ``Float32`` whose bit pattern is ``bits``."""
    return Float32(llvm.bitcast(T.f32(), _u32(bits, loc, ip), loc=loc, ip=ip))


@dsl_user_op
def max_abs_nan(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``max(a, |b|)``, or NaN if ``a`` or ``b`` is NaN."""
    text = "{.reg .f32 t; abs.f32 t, $2; max.NaN.f32 $0, $1, t;}"
    return _pure(Float32, text, Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def min_nan(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``min(a, b)``, or NaN if ``a`` or ``b`` is NaN. (PTX's plain ``min`` ignores a NaN operand and returns the
    other operand.)"""
    return _pure(Float32, "min.NaN.f32 $0, $1, $2;", Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def max_nan(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``max(a, b)``, or NaN if ``a`` or ``b`` is NaN."""
    return _pure(Float32, "max.NaN.f32 $0, $1, $2;", Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def mul_rn(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``a * b``, rounded to nearest even, never contracted into an fma."""
    return _pure(Float32, "mul.rn.f32 $0, $1, $2;", Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def add_rn(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``a + b``, rounded to nearest even, never contracted into an fma."""
    return _pure(Float32, "add.rn.f32 $0, $1, $2;", Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def sub_rn(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``a - b``, rounded to nearest even, never contracted into an fma."""
    return _pure(Float32, "sub.rn.f32 $0, $1, $2;", Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def fma_rn(a, b, c, *, loc=None, ip=None) -> Float32:
    """Return ``a * b + c``, rounded once."""
    return _pure(Float32, "fma.rn.f32 $0, $1, $2, $3;", Float32, a, b, c, loc=loc, ip=ip)


@dsl_user_op
def fma_if(condition, a, b, c, *, loc=None, ip=None) -> Float32:
    """Return ``a * b + c``, rounded once, if ``condition``, else ``c``."""
    operands = [_u32(Uint32(condition), loc, ip)] + [_f32(value, loc, ip) for value in (a, b, c)]
    text = "{.reg .pred p; setp.ne.u32 p, $1, 0; mov.b32 $0, $4; @p fma.rn.f32 $0, $2, $3, $0;}"
    return Float32(_asm(T.f32(), operands, text, "=&f,r,f,f,f", loc, ip, pure=True))


@dsl_user_op
def div_rn(a, b, *, loc=None, ip=None) -> Float32:
    """Return ``a / b``, rounded to nearest even."""
    return _pure(Float32, "div.rn.f32 $0, $1, $2;", Float32, a, b, loc=loc, ip=ip)


@dsl_user_op
def rcp_approx(a, *, loc=None, ip=None) -> Float32:
    """Return ``1 / a``, accurate to one ulp."""
    return _pure(Float32, "rcp.approx.f32 $0, $1;", Float32, a, loc=loc, ip=ip)


@dsl_user_op
def rsqrt_approx(a, *, loc=None, ip=None) -> Float32:
    """Return ``1 / sqrt(a)``, accurate to two ulps, and exact for powers of four."""
    return _pure(Float32, "rsqrt.approx.f32 $0, $1;", Float32, a, loc=loc, ip=ip)


@dsl_user_op
def ex2_approx(a, *, loc=None, ip=None) -> Float32:
    """Return ``2^a``, accurate to two ulps."""
    return _pure(Float32, "ex2.approx.f32 $0, $1;", Float32, a, loc=loc, ip=ip)


@dsl_user_op
def f16x2_toward_zero(low, high, *, loc=None, ip=None) -> Uint32:
    """Truncate two fp32 values to fp16 and pack them."""
    return _pure(Uint32, "cvt.rz.f16x2.f32 $0, $1, $2;", Float32, high, low, loc=loc, ip=ip)


@dsl_user_op
def min_abs_f16x2(a, limit: int, *, loc=None, ip=None) -> Uint32:
    """Return ``min(|a|, limit)`` of both halves. ``limit`` is a packed constant."""
    text = f"{{.reg .b32 t, l; abs.f16x2 t, $1; mov.b32 l, {limit:#x}; min.f16x2 $0, t, l;}}"
    return _pure(Uint32, text, Uint32, a, loc=loc, ip=ip)


@dsl_user_op
def max_abs_f16x2(a, b, *, loc=None, ip=None) -> Uint32:
    """Return ``max(|a|, |b|)`` of both halves. If one value is NaN, the result is the other value."""
    text = "{.reg .b32 s, t; abs.f16x2 s, $1; abs.f16x2 t, $2; max.f16x2 $0, s, t;}"
    return _pure(Uint32, text, Uint32, a, b, loc=loc, ip=ip)


@dsl_user_op
def add_16x2(a, b, dtype: str, *, loc=None, ip=None) -> Uint32:
    """Add two pairs of ``dtype`` ("bf16" or "f16"), rounded to nearest even.

    The result equals an fp32 sum that is then rounded to ``dtype``, because fp32's significand is long enough.
    """
    return _pure(Uint32, f"add.rn.{dtype}x2 $0, $1, $2;", Uint32, a, b, loc=loc, ip=ip)


@dsl_user_op
def mul_16x2(a, b, dtype: str, *, loc=None, ip=None) -> Uint32:
    """Multiply two pairs of ``dtype`` ("bf16" or "f16"), rounded to nearest even. Subnormals are not flushed to
    zero."""
    return _pure(Uint32, f"mul.rn.{dtype}x2 $0, $1, $2;", Uint32, a, b, loc=loc, ip=ip)


def _mma(shape: str, a: list, b: list, c: list, dtype: str, loc, ip) -> list:
    result = llvm.StructType.get_literal([T.f32()] * 4)
    operands = [_u32(word, loc, ip) for word in (*a, *b)] + [_f32(value, loc, ip) for value in c]
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    # All lanes must execute the instruction. The instruction is declared to have side effects, so that the compiler
    # does not move it into divergent code.
    values = _asm(result, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def mma_16x8x16(a: list, b: list, c: list, dtype: str, *, loc=None, ip=None) -> list:
    """Return ``a @ b + c``, computed by a warp. ``a`` (16 x 16) and ``b`` (16 x 8) are of ``dtype`` ("bf16" or "f16"),
    and ``c`` is fp32."""
    return _mma("m16n8k16", a, b, c, dtype, loc, ip)


@dsl_user_op
def mma_16x8x32(a: list, b: list, c: list, *, loc=None, ip=None) -> list:
    """Return ``a @ b + c``, computed by a warp. ``a`` (16 x 32) and ``b`` (32 x 8) are packed e4m3, and ``c`` is fp32.

    The tensor cores may accumulate with less than fp32's precision.
    """
    return _mma("m16n8k32", a, b, c, "e4m3", loc, ip)


@dsl_user_op
def mma_16x8x32_scaled(
    a: list, b: list, c: list, a_scales: tuple, b_scales: tuple, byte: int, *, loc=None, ip=None
) -> list:
    """Return ``a @ b + c``, computed by a warp. ``a`` (16 x 32) and ``b`` (32 x 8) are packed e4m3, with one e8m0 scale
    for each row of ``a`` and one for each column of ``b``; ``c`` is fp32.

    ``a_scales`` and ``b_scales`` are pairs: a word of four scales, which this lane provides, and an index s, which
    selects the lanes whose words the MMA uses. For ``a``, s is 0 or 1: lanes 4 i + 2 s and 4 i + 2 s + 1 provide the
    words of rows i and i + 8. For ``b``, s is 0 to 3: lane 4 i + s provides the word of column i. The MMA uses byte
    ``byte`` of each word.
    """
    result = llvm.StructType.get_literal([T.f32()] * 4)
    operands = [_u32(word, loc, ip) for word in (*a, *b)] + [_f32(value, loc, ip) for value in c]
    operands += [_u32(word, loc, ip) for word in (a_scales[0], b_scales[0])]
    text = (
        "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}, "
        f"{{$14}}, {{{byte}, {a_scales[1]}}}, {{$15}}, {{{byte}, {b_scales[1]}}};"
    )
    values = _asm(result, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f,r,r", loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def mma_16x8x64(a: list, b: list, c: list, a_scales, b_scales, nvfp4: bool, *, loc=None, ip=None) -> list:
    """Return ``a @ b + c``, computed by a warp. ``a`` (16 x 64) and ``b`` (64 x 8) are packed e2m1 with block scales,
    and ``c`` is fp32.

    A word holds the scales of 64 elements of a row, the first scale in the lowest byte: four e4m3 scales if ``nvfp4``,
    otherwise two e8m0 scales. Lanes 4 i and 4 i + 1 hold the scales of rows i and i + 8 of ``a``. Lane 4 i holds the
    scales of column i of ``b``.
    """
    kind = ("mxf4nvf4", "4X", "ue4m3") if nvfp4 else ("mxf4", "2X", "ue8m0")
    result = llvm.StructType.get_literal([T.f32()] * 4)
    operands = [_u32(word, loc, ip) for word in (*a, *b)] + [_f32(value, loc, ip) for value in c]
    operands += [_u32(word, loc, ip) for word in (a_scales, b_scales)]
    text = (
        f"mma.sync.aligned.kind::{kind[0]}.block_scale.scale_vec::{kind[1]}"
        f".m16n8k64.row.col.f32.e2m1.e2m1.f32.{kind[2]} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13}, {$14}, {0, 0}, {$15}, {0, 0};"
    )
    values = _asm(result, operands, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f,r,r", loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(4)]


def copy_async_16(target, source, exists) -> None:
    """Start a copy of 16 bytes to shared memory, bypassing L1. If ``exists`` is false, copy zeros."""
    size = select(exists, Int32(16), Int32(0))
    primitives.cp_async_shared_global(target, source, 16, primitives.LoadCacheModifier.CG, cp_size=size)


def copy_async_4(target, source, exists) -> None:
    """Start a copy of 4 bytes to shared memory. If ``exists`` is false, copy zeros."""
    size = select(exists, Int32(4), Int32(0))
    primitives.cp_async_shared_global(target, source, 4, primitives.LoadCacheModifier.CA, cp_size=size)


def copy_bulk(target, source, size, barrier, policy: int | None = None) -> None:
    """Start a bulk copy of ``size`` bytes to shared memory. The mbarrier ``barrier`` counts the copied bytes."""
    primitives.cp_async_bulk_shared_cluster_global(target, source, barrier, size, l2_cache_hint=policy)


@dsl_user_op
def pack_16x2(low, high, dtype: str, *, loc=None, ip=None) -> Uint32:
    """Round two fp32 values to nearest even to ``dtype`` ("bf16" or "f16") and pack them."""
    return _pure(Uint32, f"cvt.rn.{dtype}x2.f32 $0, $1, $2;", Float32, high, low, loc=loc, ip=ip)


@dsl_user_op
def both_halves(word, half: int, *, loc=None, ip=None) -> Uint32:
    """Return a word with one half of ``word`` in both halves. Arithmetic on 16-bit pairs then needs no broadcast."""
    text = f"{{.reg .b16 low, high; mov.b32 {{low, high}}, $1; mov.b32 $0, {{{('low, low', 'high, high')[half]}}};}}"
    return _pure(Uint32, text, Uint32, word, loc=loc, ip=ip)


@dsl_user_op
def unpack_f16(word, half: int, *, loc=None, ip=None) -> Float32:
    """Convert one fp16 half of a word to fp32."""
    source = ("h", "x") if half else ("x", "h")
    text = f"{{.reg .b16 h, x; mov.b32 {{{source[1]}, {source[0]}}}, $1; cvt.f32.f16 $0, h;}}"
    return _pure(Float32, text, Uint32, word, loc=loc, ip=ip)


@dsl_user_op
def e4m3_of(value, *, loc=None, ip=None) -> Uint32:
    """Convert a ``Float32`` to an e4m3 byte, rounded to nearest even and saturated. NaN becomes 0x7F."""
    text = "{.reg .b16 t, z; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; mov.b16 z, 0; mov.b32 $0, {t, z};}"
    return _pure(Uint32, text, Float32, value, loc=loc, ip=ip)


def _packed(values: tuple, kind: str, bits: int, loc, ip) -> Uint32:
    """Convert fp32 values to a narrow type and pack them into a word, element 0 lowest. ``bits`` is the size in bits of
    two numbers of this type."""
    pairs = range(len(values) // 2)
    registers = ", ".join(f"h{i}" for i in pairs)
    converts = " ".join(f"cvt.rn.satfinite.{kind}x2.f32 h{i}, ${2 * i + 2}, ${2 * i + 1};" for i in pairs)
    text = f"{{.reg .b{bits} {registers}; {converts} mov.b32 $0, {{{registers}}};}}"
    return _pure(Uint32, text, Float32, *values, loc=loc, ip=ip)


@dsl_user_op
def e4m3x4_of(values: tuple, *, loc=None, ip=None) -> Uint32:
    """Convert four fp32 values to e4m3 bytes, element 0 lowest, as ``e4m3_of`` does."""
    return _packed(values, "e4m3", 16, loc, ip)


@dsl_user_op
def e4m3x4_of_f16x2(low, high, *, loc=None, ip=None) -> Uint32:
    """Convert two pairs of fp16 values to e4m3 bytes, rounded to nearest even and saturated. NaN becomes 0x7F."""
    text = (
        "{.reg .b16 s, t; cvt.rn.satfinite.e4m3x2.f16x2 s, $1; cvt.rn.satfinite.e4m3x2.f16x2 t, $2; "
        "mov.b32 $0, {s, t};}"
    )
    return _pure(Uint32, text, Uint32, low, high, loc=loc, ip=ip)


@dsl_user_op
def e2m1x8_of(values: tuple, *, loc=None, ip=None) -> Uint32:
    """Convert eight fp32 values to e2m1 nibbles, element 0 lowest, in hardware (sm_100 and later)."""
    return _packed(values, "e2m1", 8, loc, ip)


@dsl_user_op
def float_of_e4m3(byte, *, loc=None, ip=None) -> Float32:
    """Convert an e4m3 byte to ``Float32``. Bits 8 and up must be zero."""
    text = (
        "{.reg .b16 t, lo, hi; .reg .b32 p; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 p, t; "
        "mov.b32 {lo, hi}, p; cvt.f32.f16 $0, lo;}"
    )
    return _pure(Float32, text, Uint32, byte, loc=loc, ip=ip)


@dsl_user_op
def f16x2_of_e4m3x2(pair, *, loc=None, ip=None) -> Uint32:
    """Convert two e4m3 bytes in the low half of a word to packed fp16, exactly."""
    text = "{.reg .b16 t; cvt.u16.u32 t, $1; cvt.rn.f16x2.e4m3x2 $0, t;}"
    return _pure(Uint32, text, Uint32, pair, loc=loc, ip=ip)


@dsl_user_op
def transpose_8x8(word, *, loc=None, ip=None) -> Uint32:
    """Transpose an 8 x 8 matrix of 16-bit elements that a warp holds. Each lane holds two elements of a row."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return Uint32(_asm(T.i32(), [_u32(word, loc, ip)], text, "=r,r", loc, ip))


@dsl_user_op
def wait(barrier, parity, sleep: int = 0, scope: str = "cta", *, loc=None, ip=None) -> None:
    """Wait until the phase of an mbarrier with this parity completes. Poll about every ``sleep`` nanoseconds, or
    without a pause if 0.

    ``scope`` is ``"cluster"`` if threads or copies of other CTAs of the cluster arrive at the mbarrier, otherwise
    ``"cta"``. A wait at cluster scope makes earlier accesses of these CTAs to shared memory visible. The wait orders
    only accesses to shared memory, because an acquire of all memory would invalidate L1 (``CCTL.IVALL``).

    Use a nonzero ``sleep`` only in warps that run far ahead of their consumers, because sleeping warps wake late. This
    function replaces ``cute.arch.mbarrier_wait``, which passes a time limit: ptxas then generates waits that sleep, and
    FP8 GEMMs were 1 to 6 % slower on an H200.
    """
    operands = [_u32(barrier.toint(loc=loc, ip=ip), loc, ip), _u32(parity, loc, ip)]
    pause = f"nanosleep.u32 {sleep}; " if sleep else ""
    order, fence = "", ""
    if scope == "cluster":
        order, fence = ".relaxed.cluster", "fence.acquire.sync_restrict::shared::cluster.cluster; "
    text = (
        f"{{.reg .pred p; AGAIN: mbarrier.try_wait.parity{order}.shared::cta.b64 p, [$0], $1; "
        f"@p bra.uni DONE; {pause}bra.uni AGAIN; DONE: {fence}}}"
    )
    _asm(None, operands, text, "r,r", loc, ip)


@dsl_user_op
def has_passed(barrier, parity, *, loc=None, ip=None) -> Boolean:
    """Return True if the phase of an mbarrier with this parity has completed. Stores before the completion are then
    visible."""
    operands = [_u32(barrier.toint(loc=loc, ip=ip), loc, ip), _u32(parity, loc, ip)]
    text = "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2, 0; selp.u32 $0, 1, 0, p;}"
    return Boolean(Uint32(_asm(T.i32(), operands, text, "=r,r,r", loc, ip)) != 0)


@dsl_user_op
def arrive_if(barrier, condition, *, loc=None, ip=None) -> None:
    """Arrive at an mbarrier of this CTA if ``condition``. The arrival is predicated, because ptxas does not overlap
    branches with wgmma."""
    operands = [_u32(barrier.toint(loc=loc, ip=ip), loc, ip), _u32(condition, loc, ip)]
    text = "{.reg .pred p; setp.ne.u32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0];}"
    _asm(None, operands, text, "r,r", loc, ip)


@dsl_user_op
def end_straight_code(never, *, loc=None, ip=None) -> None:
    """Keep ptxas from analysing the code before this point together with the code after it.

    ptxas 13.5 serialises warpgroup MMAs (C7513) if straight-line code writes registers of an MMA's A operand while
    earlier MMAs run, even if those MMAs use other registers. A predicated instruction between the writes and the MMA
    prevents this.

    Args:
        never: condition that is false, but that ptxas cannot know to be false.
    """
    text = "{.reg .pred p; setp.ne.u32 p, $0, 0; @p nanosleep.u32 0;}"
    _asm(None, [_u32(never, loc, ip)], text, "r", loc, ip)


@dsl_user_op
def arrive_at_if(barrier, rank, condition, releases: str = "all", *, loc=None, ip=None) -> None:
    """Arrive at an mbarrier of CTA ``rank`` of the cluster if ``condition``.

    Args:
        barrier: mbarrier in this CTA. The function arrives at the mbarrier with the same shared-memory offset in CTA
            ``rank``.
        rank: rank of the CTA in the cluster.
        condition: condition for the arrival.
        releases: this thread's earlier accesses that the arrival orders before accesses after a wait at cluster scope.
            ``"all"``: all accesses, by a fence at GPU scope (``MEMBAR.GPU``). ``"shared"``: accesses to this CTA's
            shared memory, by a fence at CTA scope (``MEMBAR.CTA``). ``"none"``: no accesses, without a fence. CUTLASS
            arrives in this way at barriers of other CTAs, although the memory model then orders nothing.
    """
    operands = [_u32(barrier.toint(loc=loc, ip=ip), loc, ip), _u32(rank, loc, ip), _u32(condition, loc, ip)]
    fence = "@p fence.release.sync_restrict::shared::cta.cluster; " if releases == "shared" else ""
    order = {"all": ".release.cluster", "shared": ".relaxed.cluster", "none": ""}[releases]
    text = (
        "{.reg .pred p; .reg .b32 there; setp.ne.u32 p, $2, 0; mapa.shared::cluster.u32 there, $0, $1; "
        f"{fence}@p mbarrier.arrive{order}.shared::cluster.b64 _, [there];}}"
    )
    _asm(None, operands, text, "r,r,r", loc, ip)


@dsl_user_op
def expect_and_send(own, barrier, size: int, rank, *, loc=None, ip=None) -> None:
    """Send ``size`` bytes of shared memory to CTA ``rank`` of the cluster, and expect the same number of bytes from
    that CTA.

    The function arrives at this CTA's mbarrier and makes it expect the bytes from the other CTA. The function then
    starts a bulk copy from ``own`` to the same offset in the other CTA's shared memory. The other CTA's mbarrier counts
    the copied bytes.
    """
    operands = [_u32(one.toint(loc=loc, ip=ip), loc, ip) for one in (own, barrier)]
    operands.append(_u32(rank, loc, ip))
    text = (
        "{.reg .b32 to, there; mapa.shared::cluster.u32 to, $0, $2; mapa.shared::cluster.u32 there, $1, $2; "
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[to], [$0], {size}, [there];}}"
    )
    _asm(None, operands, text, "r,r,r", loc, ip)


@dsl_user_op
def address_at(pointer, rank, *, loc=None, ip=None) -> Uint32:
    """Return the address in the shared memory of CTA ``rank`` of the cluster that corresponds to ``pointer`` in this
    CTA."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return _pure(Uint32, text, Uint32, pointer.toint(loc=loc, ip=ip), rank, loc=loc, ip=ip)


@dsl_user_op
def send(address, words: list, barrier, offset: int = 0, *, loc=None, ip=None) -> None:
    """Store four words in another CTA of the cluster, ``offset`` bytes after an aligned ``address`` (from
    ``address_at``).

    ``barrier`` is the address of an mbarrier in the other CTA, which counts the bytes. This function replaces the DSL's
    ``store_async_dsmem``. With the DSL's function, the compiler first computes the addresses of many stores, and holds
    all these addresses in registers.
    """
    operands = [_u32(one, loc, ip) for one in (address, barrier, *words)]
    text = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0+{offset}], {{$2, $3, $4, $5}}, [$1];"
    _asm(None, operands, text, "r,r,r,r,r,r", loc, ip)


@dsl_user_op
def store_release(pointer, value, *, loc=None, ip=None) -> None:
    """Store a word in global memory with release semantics, at GPU scope."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), _u32(value, loc, ip)]
    _asm(None, operands, "st.release.gpu.global.u32 [$0], $1;", "l,r", loc, ip)


@dsl_user_op
def add_release_if(pointer, value, condition, *, loc=None, ip=None) -> None:
    """Add to a word of global memory with release semantics, at GPU scope, if ``condition``."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    operands += [_u32(value, loc, ip), _u32(Uint32(condition), loc, ip)]
    text = "{.reg .pred p; setp.ne.u32 p, $2, 0; @p red.release.gpu.global.add.u32 [$0], $1;}"
    _asm(None, operands, text, "l,r,r", loc, ip)


@dsl_user_op
def load_acquire(pointer, *, loc=None, ip=None) -> Uint32:
    """Load a word of global memory with acquire semantics, at GPU scope."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    return Uint32(_asm(T.i32(), operands, "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", loc, ip))


@dsl_user_op
def load_if(pointer, condition, words: int, offset: int = 0, past_l1: bool = False, *, loc=None, ip=None) -> list:
    """Load one, two or four words of global memory, ``offset`` bytes after ``pointer``, or return zeros if not
    ``condition``.

    Set ``past_l1`` to bypass L1 for data that no thread of the SM reads again.
    """
    names = [f"${i}" for i in range(words)]
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), _u32(Uint32(condition), loc, ip)]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    vector, targets = ("", names[0]) if words == 1 else (f".v{words}", f"{{{', '.join(names)}}}")
    text = (
        f"{{.reg .pred p; setp.ne.u32 p, ${words + 1}, 0; {zeros} "
        f"@p ld.global{'.L1::no_allocate' if past_l1 else ''}{vector}.b32 {targets}, [${words}+{offset}];}}"
    )
    # The instructions write outputs before they read the last input, so outputs and inputs must not share a register.
    constraints = ",".join(["=&r"] * words + ["l", "r"])
    result = llvm.StructType.get_literal([T.i32()] * words) if words > 1 else T.i32()
    values = _asm(result, operands, text, constraints, loc, ip)
    if words == 1:
        return [Uint32(values)]
    return [Uint32(llvm.extractvalue(T.i32(), values, [i], loc=loc, ip=ip)) for i in range(words)]


@dsl_user_op
def store_if(pointer, words: list, condition, offset: int = 0, *, loc=None, ip=None) -> None:
    """Store one, two or four words in global memory, ``offset`` bytes after ``pointer``, if ``condition``.

    The store is predicated instead of branched over, because the compiler would not move other stores across a branch.
    """
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), _u32(Uint32(condition), loc, ip)]
    operands += [_u32(word, loc, ip) for word in words]
    vector = f".v{len(words)}" if len(words) > 1 else ""
    values = ", ".join(f"${2 + i}" for i in range(len(words)))
    values = f"{{{values}}}" if len(words) > 1 else values
    text = f"{{.reg .pred p; setp.ne.u32 p, $1, 0; @p st.global{vector}.b32 [$0+{offset}], {values};}}"
    _asm(None, operands, text, ",".join("lr" + "r" * len(words)), loc, ip)


@dsl_user_op
def load_shared_if(pointer, condition, *, loc=None, ip=None) -> Uint32:
    """Load a word of shared memory, or return zero if not ``condition``."""
    operands = [_u32(pointer.toint(loc=loc, ip=ip), loc, ip), _u32(Uint32(condition), loc, ip)]
    text = "{.reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1];}"
    return Uint32(_asm(T.i32(), operands, text, "=&r,r,r", loc, ip))


@dsl_user_op
def store_shared_if(pointer, word, condition, *, loc=None, ip=None) -> None:
    """Store a word in shared memory if ``condition``."""
    operands = [_u32(value, loc, ip) for value in (pointer.toint(loc=loc, ip=ip), word, Uint32(condition))]
    text = "{.reg .pred p; setp.ne.u32 p, $2, 0; @p st.shared.b32 [$0], $1;}"
    _asm(None, operands, text, "r,r,r", loc, ip)


@dsl_user_op
def load_narrow_if(pointer, condition, bytes_: int, offset: int = 0, *, loc=None, ip=None) -> Uint32:
    """Load one or two bytes of global memory, ``offset`` bytes after ``pointer``, or return zero if not
    ``condition``."""
    operands = [pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), _u32(Uint32(condition), loc, ip)]
    load = f"ld.global.u{8 * bytes_} $0, [$1+{offset}]"
    text = f"{{.reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p {load};}}"
    return Uint32(_asm(T.i32(), operands, text, "=&r,l,r", loc, ip))
