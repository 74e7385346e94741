"""``tcgen05`` instructions, as PTX. These instructions use the tensor memory and the tensor cores of data-center
Blackwell.

One thread issues all operations of a tile (``copy_scales``, the ``multiply`` functions, ``commit``). The operations are
asynchronous. The scale copies and MMAs that this thread issues execute in the order of issue. ``commit`` makes an
mbarrier complete when all of these operations have ended. (PTX ISA, "TensorCore 5th generation".)
"""

from typing import Final

from cutlass import Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from torch_cute_ops.kernels.common.core import ptx

_VERSION: Final = 1 << 46
_SWIZZLE_128: Final = 2 << 61


def operand_descriptor(address) -> Uint64:
    """Return the shared-memory descriptor of an operand at ``address``: K-major rows of 128 bytes with the 128-byte
    swizzle.

    Eight rows take 1,024 bytes. To skip the first n bytes of each row, pass the address plus n, where n is a multiple
    of 32.
    """
    return _descriptor(address, 1024) | Uint64(_SWIZZLE_128)


def scale_descriptor(address) -> Uint64:
    """Return the shared-memory descriptor of 32 consecutive rows of 16 bytes, which hold the scales of 128 operand
    rows."""
    return _descriptor(address, 128)


def _descriptor(address, stride: int) -> Uint64:
    # The address field takes 14 bits.
    start = Uint64(Uint32(address) >> 4 & 0x3FFF)
    # Rows of codes are as wide as a swizzle atom, and rows of scales are 16 bytes wide. For both, the hardware ignores
    # the stride of the leading dimension, for which the descriptor holds 1.
    return start | Uint64(_VERSION | stride >> 4 << 32 | 1 << 16)


def instruction_descriptor(rows: int, columns: int, ue8m0: bool, scale_id: int) -> int:
    """Return the instruction descriptor of an MMA with e2m1 operands: M is ``rows``, N is ``columns``, and K is 64.

    ``scale_id`` is the index of a byte in a 32-bit word of scales. The MMA's scales of both operands begin at this
    byte.
    """
    e2m1 = 1 << 7 | 1 << 10
    return e2m1 | scale_id << 4 | columns // 8 << 17 | int(ue8m0) << 23 | rows // 128 << 27 | scale_id << 29


def fp8_instruction_descriptor(rows: int, columns: int) -> int:
    """Return the instruction descriptor of an MMA with e4m3 operands and fp32 accumulators: M is ``rows``, N is
    ``columns``, and K is 32."""
    fp32 = 1 << 4
    return fp32 | columns // 8 << 17 | rows // 16 << 24


def sixteen_bit_instruction_descriptor(rows: int, columns: int, is_bf16: bool) -> int:
    """Return the instruction descriptor of an MMA with bf16 or fp16 operands and fp32 accumulators: M is ``rows``, N is
    ``columns``, and K is 16."""
    formats, fp32 = (1 << 7 | 1 << 10) if is_bf16 else 0, 1 << 4
    return formats | fp32 | columns // 8 << 17 | rows // 16 << 24


def mx_instruction_descriptor(rows: int, columns: int, m_side: str, m_scale_id: int, n_scale_id: int) -> int:
    """Return the instruction descriptor of an MMA of ``kind::mxf8f6f4``: M is ``rows``, N is ``columns``, K is 32.

    The operand on the M side is ``m_side``, "e2m1" or "e4m3", the operand on the N side is e4m3, and scales are ue8m0.
    ``m_scale_id`` and ``n_scale_id`` are the indices of the scale bytes, in 32-bit words of scales, that the M side and
    the N side use.
    """
    formats, ue8m0 = {"e4m3": 0, "e2m1": 5 << 7}[m_side], 1 << 23
    return formats | n_scale_id << 4 | columns // 8 << 17 | ue8m0 | rows // 128 << 27 | m_scale_id << 29


def _run(operands: list, text: str, constraints: str, loc, ip) -> None:
    ptx._asm(None, operands, text, constraints, loc, ip, pure=False)


def _address(pointer, loc, ip):
    return ptx._u32(pointer.toint(loc=loc, ip=ip), loc, ip)


@dsl_user_op
def allocate(to, columns: int, cta_group: int, *, loc=None, ip=None) -> None:
    """Allocate ``columns`` columns of tensor memory (a power of two, at least 32), and write their address to ``to``.

    One warp calls this function. If ``cta_group`` is 2, one warp of each CTA of the pair must call it. Afterwards,
    other CTAs of the SM may allocate too.
    """
    text = (
        f"tcgen05.alloc.cta_group::{cta_group}.sync.aligned.shared::cta.b32 [$0], {columns}; "
        f"tcgen05.relinquish_alloc_permit.cta_group::{cta_group}.sync.aligned;"
    )
    _run([_address(to, loc, ip)], text, "r", loc, ip)


@dsl_user_op
def free(address, columns: int, cta_group: int, *, loc=None, ip=None) -> None:
    """Free columns of tensor memory. The warp that allocated the columns must call this function."""
    text = f"tcgen05.dealloc.cta_group::{cta_group}.sync.aligned.b32 $0, {columns};"
    _run([ptx._u32(address, loc, ip)], text, "r", loc, ip)


@dsl_user_op
def copy_scales(address, descriptor, cta_group: int, *, loc=None, ip=None) -> None:
    """Copy the scales of 128 rows, 512 bytes, from shared memory to four columns of tensor memory.

    In shared memory, scale ``b`` of row ``r`` is byte ``16 (r % 32) + 4 (r // 32) + b``. The copy writes it to column
    ``r // 32`` of lane ``r % 32``, and repeats it in each of the four groups of 32 lanes.
    """
    operands = [ptx._u32(address, loc, ip), Uint64(descriptor).ir_value(loc=loc, ip=ip)]
    _run(operands, f"tcgen05.cp.cta_group::{cta_group}.32x128b.warpx4 [$0], $1;", "r,l", loc, ip)


@dsl_user_op
def multiply(
    acc, a, b, instruction: int, a_scales, b_scales, adds, block: int, cta_group: int, *, loc=None, ip=None
) -> None:
    """Compute ``acc = a @ b``, or ``acc += a @ b`` if ``adds`` is true, for FP4 operands with block scales. Each scale
    belongs to ``block`` elements of a row."""
    name = f"cta_group::{cta_group}.kind::mxf4nvf4.block_scale.block{block}"
    _multiply_scaled(name, acc, a, b, instruction, a_scales, b_scales, adds, loc, ip)


@dsl_user_op
def multiply_fp8(acc, a, b, instruction: int, adds, cta_group: int, *, loc=None, ip=None) -> None:
    """Compute ``acc = a @ b``, or ``acc += a @ b`` if ``adds`` is true. The operands are FP8 without scales."""
    operands = [ptx._u32(acc, loc, ip)]
    operands += [Uint64(one).ir_value(loc=loc, ip=ip) for one in (a, b)]
    operands += [ptx._u32(one, loc, ip) for one in (Uint32(instruction), Uint32(adds))]
    text = (
        f"{{.reg .pred p; setp.ne.u32 p, $4, 0; tcgen05.mma.cta_group::{cta_group}.kind::f8f6f4 [$0], $1, $2, $3, p;}}"
    )
    _run(operands, text, "r,l,l,r,r", loc, ip)


@dsl_user_op
def multiply_16_bit(acc, a, b, instruction: int, adds, *, loc=None, ip=None) -> None:
    """Compute ``acc = a @ b``, or ``acc += a @ b`` if ``adds`` is true. The operands are bf16 or fp16.

    ``a`` is the tensor-memory address of the operand. Each of its rows is a lane, and each column holds two elements.
    """
    operands = [ptx._u32(one, loc, ip) for one in (acc, a)]
    operands.append(Uint64(b).ir_value(loc=loc, ip=ip))
    operands += [ptx._u32(one, loc, ip) for one in (Uint32(instruction), Uint32(adds))]
    text = "{.reg .pred p; setp.ne.u32 p, $4, 0; tcgen05.mma.cta_group::1.kind::f16 [$0], [$1], $2, $3, p;}"
    _run(operands, text, "r,r,l,r,r", loc, ip)


@dsl_user_op
def multiply_mx(acc, a, b, instruction: int, a_scales, b_scales, adds, cta_group: int, *, loc=None, ip=None) -> None:
    """Compute ``acc = a @ b``, or ``acc += a @ b`` if ``adds`` is true, for FP4 or FP8 ``a`` and FP8 ``b``. Each scale
    belongs to 32 elements of a row."""
    name = f"cta_group::{cta_group}.kind::mxf8f6f4.block_scale.scale_vec::1X"
    _multiply_scaled(name, acc, a, b, instruction, a_scales, b_scales, adds, loc, ip)


def _multiply_scaled(name: str, acc, a, b, instruction: int, a_scales, b_scales, adds, loc, ip) -> None:
    operands = [ptx._u32(acc, loc, ip)]
    operands += [Uint64(one).ir_value(loc=loc, ip=ip) for one in (a, b)]
    operands += [ptx._u32(one, loc, ip) for one in (Uint32(instruction), a_scales, b_scales, Uint32(adds))]
    text = f"{{.reg .pred p; setp.ne.u32 p, $6, 0; tcgen05.mma.{name} [$0], $1, $2, $3, [$4], [$5], p;}}"
    _run(operands, text, "r,l,l,r,r,r,r", loc, ip)


@dsl_user_op
def commit(barrier, cta_group: int, both: bool, *, loc=None, ip=None) -> None:
    """Arrive at an mbarrier when all earlier operations of this thread have ended. If ``both`` is True, arrive in both
    CTAs of a pair."""
    operands = [_address(barrier, loc, ip)]
    text = f"tcgen05.commit.cta_group::{cta_group}.mbarrier::arrive::one.shared::cluster"
    if not both:
        return _run(operands, f"{text}.b64 [$0];", "r", loc, ip)
    text = f"{{.reg .b16 both; mov.b16 both, 3; {text}.multicast::cluster.b64 [$0], both;}}"
    return _run(operands, text, "r", loc, ip)


@dsl_user_op
def load(address, columns: int, *, loc=None, ip=None) -> list:
    """Load ``columns`` words from this thread's lane of tensor memory. The words are valid after ``wait_for_loads``."""
    result = llvm.StructType.get_literal([T.i32()] * columns)
    names = ", ".join(f"${i}" for i in range(columns))
    text = f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{names}}}, [${columns}];"
    constraints = ",".join(["=r"] * columns + ["r"])
    values = ptx._asm(result, [ptx._u32(address, loc, ip)], text, constraints, loc, ip, pure=False)
    return [Uint32(llvm.extractvalue(T.i32(), values, [i], loc=loc, ip=ip)) for i in range(columns)]


@dsl_user_op
def wait_for_loads(*, loc=None, ip=None) -> None:
    """Wait until all of this thread's loads from tensor memory have ended."""
    _run([], "tcgen05.wait::ld.sync.aligned;", "", loc, ip)


@dsl_user_op
def store(address, words: list, *, loc=None, ip=None) -> None:
    """Store words to consecutive columns of this thread's lane of tensor memory. The stores are complete after
    ``wait_for_stores``."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    text = f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [$0], {{{names}}};"
    _run([ptx._u32(one, loc, ip) for one in (address, *words)], text, ",".join("r" * (1 + len(words))), loc, ip)


@dsl_user_op
def wait_for_stores(*, loc=None, ip=None) -> None:
    """Wait until all of this thread's stores to tensor memory have ended."""
    _run([], "tcgen05.wait::st.sync.aligned;", "", loc, ip)


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """Order this thread's earlier tcgen05 operations before later tcgen05 operations of other threads.

    Call this function before the threads synchronise. The other threads call ``fence_after`` after they synchronise.
    """
    _run([], "tcgen05.fence::before_thread_sync;", "", loc, ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """Order this thread's later tcgen05 operations after earlier tcgen05 operations of other threads.

    Call this function after the threads synchronise. The other threads call ``fence_before`` before they synchronise.
    """
    _run([], "tcgen05.fence::after_thread_sync;", "", loc, ip)
