"""Loads and stores of memory that several GPUs share, and the loop that waits for a peer's words."""

from typing import Final

from cutlass import Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

ABSENT: Final = 0xFFFFFFFF
"""Value of a word of the staging that no peer has written yet. In each dtype it consists of NaNs."""
OTHER_NAN: Final = 0xFFFF7FFF
"""Word that is sent instead of ``ABSENT``. This word consists of NaNs too, but with other payloads, which the sum does
not keep."""
POLLS: Final = 4
PAUSE_NS: Final = 40
"""Number of loads that a waiting thread issues without pauses (about 1 µs in total), and length of the pause before
each later load. Pauses are needed because the loads of many waiting threads delay other loads and the peers' stores."""
_ANY_ABSENT: Final = f"setp.eq.b32 p, $0, {ABSENT:#x}; " + " ".join(
    f"setp.eq.or.b32 p, ${i}, {ABSENT:#x}, p;" for i in range(1, 4)
)
"""PTX that sets the predicate p if one of the words $0 to $3 is ``ABSENT``."""


def _asm(result, operands: list, text: str, constraints: str, loc, ip):
    return llvm.inline_asm(result, operands, text, constraints, has_side_effects=True, loc=loc, ip=ip)


def _u32(value, loc, ip):
    return Uint32(value).ir_value(loc=loc, ip=ip)


def _u64(value, loc, ip):
    return Int64(value).ir_value(loc=loc, ip=ip)


@dsl_user_op
def store_far_if(address, words: list, condition, *, loc=None, ip=None) -> None:
    """Store four words in global memory of any GPU if ``condition``. Each word is stored as a whole."""
    operands = [_u64(address, loc, ip), _u32(Uint32(condition), loc, ip), *(_u32(word, loc, ip) for word in words)]
    text = "{.reg .pred p; setp.ne.u32 p, $1, 0; @p st.relaxed.sys.global.v4.u32 [$0], {$2, $3, $4, $5};}"
    _asm(None, operands, text, "l,r,r,r,r,r", loc, ip)


@dsl_user_op
def load_far_if(address, condition, *, loc=None, ip=None) -> list:
    """Load four words that another GPU may be writing, or return zeros if not ``condition``."""
    operands = [_u64(address, loc, ip), _u32(Uint32(condition), loc, ip)]
    text = (
        "{.reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.relaxed.sys.global.v4.u32 {$0, $1, $2, $3}, [$4];}"
    )
    return _four_words(operands, text, "l,r", loc, ip)


@dsl_user_op
def load_again_if(words: list, address, condition, *, loc=None, ip=None) -> list:
    """If ``condition`` is true and one of four words is ``ABSENT``, load all four words again. Return the words."""
    operands = [_u32(word, loc, ip) for word in words]
    operands += [_u64(address, loc, ip), _u32(Uint32(condition), loc, ip)]
    text = (
        "{.reg .pred p; mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; "
        f"{_ANY_ABSENT} setp.ne.and.u32 p, $9, 0, p; "
        "@p ld.relaxed.sys.global.v4.u32 {$0, $1, $2, $3}, [$8];}"
    )
    return _four_words(operands, text, "r,r,r,r,l,r", loc, ip)


@dsl_user_op
def await_far_if(words: list, address, condition, deadline, failed, report, *, loc=None, ip=None) -> list:
    """If ``condition`` is true, load four words again until none is ``ABSENT``, and return them. Otherwise return
    ``words``.

    If the deadline passes first, store 1 in the words at ``failed`` and ``report``, and return the words that were
    loaded last.

    Args:
        words: words that were loaded before.
        address: address of the words.
        condition: True to wait.
        deadline: value of the GPU's global timer, in ns, at which the wait ends.
        failed, report: addresses of a word in this GPU's memory, and of a word that the host can read.
    """
    operands = [_u32(word, loc, ip) for word in words]
    operands += [_u64(address, loc, ip), _u32(Uint32(condition), loc, ip)]
    operands += [_u64(value, loc, ip) for value in (deadline, failed, report)]
    text = (
        "{.reg .pred p, q; .reg .b64 now; .reg .b32 one, polls; "
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; "
        "setp.eq.u32 q, $9, 0; @q bra DONE; mov.b32 polls, 0; "
        f"AGAIN: {_ANY_ABSENT} @!p bra DONE; "
        f"setp.ge.u32 q, polls, {POLLS}; add.u32 polls, polls, 1; @q nanosleep.u32 {PAUSE_NS}; "
        f"ld.relaxed.sys.global.v4.u32 {{$0, $1, $2, $3}}, [$8]; "
        "mov.u64 now, %globaltimer; setp.lt.u64 q, now, $10; @q bra AGAIN; "
        f"{_ANY_ABSENT} @!p bra DONE; "
        "mov.b32 one, 1; st.relaxed.gpu.global.u32 [$11], one; st.relaxed.sys.global.u32 [$12], one; DONE:}"
    )
    return _four_words(operands, text, "r,r,r,r,l,r,l,l,l", loc, ip)


def _four_words(operands: list, text: str, inputs: str, loc, ip) -> list:
    result = llvm.StructType.get_literal([T.i32()] * 4)
    values = _asm(result, operands, text, f"=&r,=&r,=&r,=&r,{inputs}", loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), values, [i], loc=loc, ip=ip)) for i in range(4)]


@dsl_user_op
def now(*, loc=None, ip=None) -> Int64:
    """Return the GPU's global timer, in ns."""
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l", loc, ip))


@dsl_user_op
def load_word(address, *, loc=None, ip=None) -> Uint32:
    """Load a word of this GPU's memory, bypassing L1."""
    return Uint32(_asm(T.i32(), [_u64(address, loc, ip)], "ld.relaxed.gpu.global.u32 $0, [$1];", "=r,l", loc, ip))


@dsl_user_op
def store_word(address, word, *, loc=None, ip=None) -> None:
    """Store a word in this GPU's memory."""
    operands = [_u64(address, loc, ip), _u32(word, loc, ip)]
    _asm(None, operands, "st.relaxed.gpu.global.u32 [$0], $1;", "l,r", loc, ip)
