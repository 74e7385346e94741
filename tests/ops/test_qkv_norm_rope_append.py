"""Rules of ``qkv_norm_rope_append`` that its samples do not cover."""

import re

import expected.qkv_norm_rope_append
import pytest
import samples.qkv_norm_rope_append as made
import torch
from expected import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import arguments, copied, get_sample, named, run
from support.launch_model import launches  # noqa: F401  (a fixture)
from support.strategies import generators
from torch._inductor.utils import run_and_get_code
from torch.utils._triton import has_triton

import torch_cute_ops
from torch_cute_ops.ops import _checks
from torch_cute_ops.registry import OPS, kernels_of
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.verification import Verifier

OP = OPS["qkv_norm_rope_append"]
CPU = torch.device("cpu")
FP8, FP4 = torch.float8_e4m3fn, torch.uint8
CACHES = expected.qkv_norm_rope_append.UPDATED


def test_numbers_of_scales_are_checked_on_later_calls(launches):  # noqa: F811
    """Check that a wrong number of scales is refused if a launcher for such calls exists, and that nothing is
    launched."""
    heads = (3, 2)
    given = made.arguments(4, CPU, dim=64, heads=heads, key=FP8, value=FP8) | {"q_dtype": FP8}
    counts = {"q_scale": heads[0], "k_scale": heads[1], "v_scale": heads[1]}
    good = {name: torch.ones(count) for name, count in counts.items()}
    OP.cuda(**given, **good)
    launched = len(launches.calls)
    assert launched == 1
    for name, count in counts.items():
        for wrong in (0, count + 1):
            with pytest.raises(ValueError, match=rf"got {name} with shape"):
                OP.cuda(**given, **{**good, name: torch.ones(wrong)})
    assert len(launches.calls) == launched


@pytest.mark.gpu
def test_offsets_of_more_than_32_bits():
    """Write to a block that begins 2^32 bytes after the first block, in two caches that alternate in memory."""
    device, shape, strides = torch.device("cuda"), (2, 16, 2, 64), (2**32, 128, 64, 1)
    memory = torch.zeros(2**32 + 2**20, dtype=torch.uint8, device=device).view(FP8)
    caches = [memory.as_strided(shape, strides, 2**12 * i) for i in range(2)]
    given = made.arguments(4, device, dim=64, heads=(3, 2), key=FP8, value=FP8, pages=(2, 16))
    given["slots"] = torch.tensor([31, 16, 0, -1], device=device)
    small = {
        name: torch.zeros(shape, dtype=torch.uint8, device=device).view(FP8) for name in ("key_cache", "value_cache")
    }
    want = torch_cute_ops.qkv_norm_rope_append(**(given | small))
    got = torch_cute_ops.qkv_norm_rope_append(**(given | dict(zip(small, caches, strict=True))))
    assert torch.equal(got, want)
    for cache, right in zip(caches, small.values(), strict=True):
        assert torch.equal(cache.view(torch.uint8), right.view(torch.uint8))
        assert right[1].float().abs().sum() > 0


# Random calls


@st.composite
def calls(draw, device):
    """Draw arguments by name: any combination of sizes, dtypes, scales and memory layouts that the op accepts."""
    generator = draw(generators())
    torch.manual_seed(generator.initial_seed())
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16)))
    dim = draw(st.sampled_from((64, 80, 96, 128, 192, 256)))
    q_heads, kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    key, value = (draw(st.sampled_from((dtype, FP8, FP4))) for _ in range(2))
    rows = draw(st.integers(0, 9))
    given = made.arguments(
        rows,
        device,
        dim=dim,
        heads=(q_heads, kv_heads),
        rotary=2 * draw(st.integers(1, dim // 2)),
        dtype=dtype,
        table_dtype=draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32))),
        key=key,
        value=value,
        pages=(draw(st.integers(1, 4)), draw(st.sampled_from((1, 3, 16)))),
        layout=draw(st.sampled_from(("nhd", "hnd"))),
        appended=draw(st.integers(0, rows)),
        integers=draw(st.sampled_from((torch.int32, torch.int64))),
        interleaved=draw(st.booleans()),
        norm_plus_one=draw(st.booleans()),
        eps=draw(st.sampled_from((0.0, 1e-6, 1.0))),
    )
    for name in ("q_norm", "k_norm"):
        kind = draw(st.sampled_from((None, dtype, torch.float32)))
        given[name] = None if kind is None else made.weight(dim, kind, device)
    given["q_dtype"] = draw(st.sampled_from((None, dtype, FP8)))
    for name, stored, heads in (("q", given["q_dtype"], q_heads), ("k", key, kv_heads), ("v", value, kv_heads)):
        if stored in (FP8, FP4):
            count = draw(st.sampled_from((None, 1, heads)))
            given[f"{name}_scale"] = None if count is None else made.scale(count, device)
    return given


def test_random_calls(device):
    """Check q and the caches of random calls bit for bit."""

    @settings(max_examples=60, database=None)
    @given(calls(torch.device(device)))
    def check(given):
        sample = named(OP, given)
        want = expected.qkv_norm_rope_append.results(arguments(OP, sample))
        assert_same(run(OP, sample), want)

    check()


# Values of indices


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("slots", [0, 65, 1], "slots holds 65, out of range: there are 65 slots of the caches"),
        ("slots", [0, -2, 1], "slots holds -2, out of range"),
        ("slots", [2**40, 1], f"slots holds {2**40}, out of range"),
        ("slots", [7, -1, 3, 7], "slots holds 7 twice; expected a slot of its own for each row, or -1"),
        ("positions", [0, 1, 83, 2], "positions holds 83, out of range: there are 83 rows of cos_sin"),
        ("positions", [0, -1, 0, 2], "positions holds -1, out of range; expected at least 0"),
    ],
)
def test_wrong_indices_are_refused(name, values, message):
    """Check that wrong indices are refused on a CPU before anything is written, and on a GPU in debug mode."""
    given = made.arguments(4, CPU) | {name: torch.tensor(values)}
    before = given["key_cache"].clone()
    with pytest.raises(ValueError, match=f"^{re.escape(f'cute::{OP.name}: {message}')}"):
        torch_cute_ops.qkv_norm_rope_append(**given)
    assert torch.equal(given["key_cache"], before)
    with pytest.raises(ValueError, match=re.escape(message)):
        Verifier(OP).before(OP.bind(**given))


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_debug_mode_refuses_scales_that_are_not_finite(name, wrong):
    given = arguments(OP, get_sample(OP, "everything", "cpu"))
    given[name][-1] = wrong
    with pytest.raises(ValueError, match=f"cute::{OP.name}: {name} holds {wrong}; expected finite numbers"):
        Verifier(OP).before(OP.bind(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, FP8, FP4], ids=["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_indices_out_of_range_on_a_gpu(kind, integers):
    """Check that rows whose slot is out of range are written neither to a cache nor to the memory around it, and that
    the rotated elements of rows with a position out of range are NaN."""
    device, count = torch.device("cuda"), 12
    given = made.arguments(count, device, key=kind, value=kind, pages=(40, 16), rotary=32, integers=integers)
    whole = {name: given[name] for name in CACHES if name in given}
    inner = {name: cache[16:24] for name, cache in whole.items()}
    least, most = torch.iinfo(integers).min, torch.iinfo(integers).max
    slots = torch.tensor([0, 127, 128, -2, least, most, 129, 600, -100, 5, 2**31 - 1, -1]).to(device, integers)
    positions = torch.tensor([0, 82, 83, -1, least, most, 1, 84, -100, 5, 2**31 - 1, 7]).to(device, integers)
    before = {name: cache.clone() for name, cache in whole.items()}
    q = torch_cute_ops.qkv_norm_rope_append(**{**given, **inner, "slots": slots, "positions": positions})
    good = {"slots": torch.where((slots >= 0) & (slots < 128), slots, -1)}
    good["positions"] = torch.where((positions >= 0) & (positions < made.ROWS_OF_TABLE), positions, made.ROWS_OF_TABLE)
    good["cos_sin"] = torch.cat((given["cos_sin"], torch.full_like(given["cos_sin"][:1], torch.nan)))
    inside = {name: cache[16:24].clone() for name, cache in before.items()}
    want = expected.qkv_norm_rope_append.results(arguments(OP, named(OP, {**given, **inside, **good})))
    for cache, result in zip(before.values(), want[1:], strict=True):
        cache[16:24] = result.to(device)
    assert_same((q, *whole.values()), (want[0], *before.values()))


@pytest.mark.parametrize("name", CACHES)
def test_debug_mode_finds_a_wrong_slot(name, device):
    """Check that debug mode finds a wrong value in a slot of a cache after a call, and copies no cache."""
    given = arguments(OP, get_sample(OP, "everything", device))
    given["slots"] = torch.arange(len(given["qkv"]), device=device)
    call, verifier = OP.bind(**given), Verifier(OP)
    assert verifier.before(call) == {}
    outputs = (OP.function(**given),)
    verifier.after(call, {}, outputs)
    bytes_ = given[name].view(torch.uint8)
    bytes_[0, 0] ^= 0x24  # the slot of the first row, which is always compared
    with pytest.raises(RuntimeError, match=f"{name} is wrong"):
        verifier.after(call, {}, outputs)


# Static properties


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_properties_name_the_kernel_of_a_call(arch):
    """Check that a warm-up with a call's static properties prepares the kernel that the call launches."""
    for sample in made.sample_inputs(CPU):
        given = arguments(OP, sample)
        properties = OP.path.properties(OP.bind(**given))
        assert kernels_of(OP.name, arch, **properties) == OP.kernels(ARCHS[arch], **given), sample.name


# Memory layouts


@pytest.mark.parametrize("layout", ["block", "slot", "head", "element"])
def test_caches_of_one_tensor(layout, device):
    """Check that keys and values may alternate in one tensor, at any dimension, and that the result is the same as with
    separate caches."""
    given = made.arguments(6, torch.device(device), heads=(2, 2), pages=(5, 4))
    want = run(OP, named(OP, given))
    dim = ("block", "slot", "head", "element").index(layout)
    both = torch.stack((given["key_cache"], given["value_cache"]), dim + 1 if dim < 3 else 3)
    together = {**given, "key_cache": both.select(min(dim + 1, 3), 0), "value_cache": both.select(min(dim + 1, 3), 1)}
    assert together["key_cache"].shape == given["key_cache"].shape
    assert_same(run(OP, named(OP, together)), want)


def test_scales_next_to_codes(device):
    """Check a cache in which the block scales of a head follow its codes."""
    given = made.arguments(6, torch.device(device), heads=(2, 2), pages=(5, 4), key=FP4, value=FP8)
    want = run(OP, named(OP, given))
    packed = torch.cat((given["key_cache"], given["key_block_scale"].view(FP4)), -1)
    together = {**given, "key_cache": packed[..., :32], "key_block_scale": packed[..., 32:].view(FP8)}
    assert_same(run(OP, named(OP, together)), want)


@st.composite
def placed_pairs(draw):
    """Draw two small tensors in one storage, each with strides for which no two of its elements share an address."""
    storage = torch.zeros(200, dtype=torch.uint8)
    pair = []
    for _ in range(2):
        shape = draw(st.tuples(*[st.integers(1, 3)] * 3))
        strides = draw(st.permutations((1, draw(st.sampled_from((3, 4, 6))), draw(st.sampled_from((12, 18, 24))))))
        pair.append(storage.as_strided(shape, strides, draw(st.integers(0, 40))))
    return pair


@settings(max_examples=400)
@given(placed_pairs())
def test_alternating_tensors_share_no_element(pair):
    """Check that tensors which count as alternating share no element."""
    one, other = pair
    if _checks._overlap(one, other) and _checks._alternate(one, other):
        one.fill_(1)
        assert not other.any()


# Compiled programs


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True], ids=["two-tensors", "one-tensor"])
def test_inductor_updates_caches_in_place(together, device):
    """Check that generated code updates the program's caches in place, without copies, in several layers."""
    if device == "cuda" and not has_triton():
        pytest.skip("Inductor needs Triton on a GPU")
    sample = get_sample(OP, "fp8-one-scale" if not together else "alternate", device)
    given = arguments(OP, copied(sample))
    names = ("key_cache", "value_cache")
    rest = {name: value for name, value in given.items() if name not in (*names, "qkv")}
    caches = [given[name] for name in names]
    if together:  # the program makes views of one tensor
        whole = torch.stack(caches, 1).contiguous()
        caches = [whole]

    def program(qkv, *tensors):
        views = (tensors[0][:, 0], tensors[0][:, 1]) if together else tensors
        return [
            torch_cute_ops.qkv_norm_rope_append(qkv * (layer + 1), key_cache=views[0], value_cache=views[1], **rest)
            for layer in range(3)
        ]

    eager = [cache.clone() for cache in caches]
    want = program(given["qkv"], *eager)
    places = [cache.data_ptr() for cache in caches]
    got, (code,) = run_and_get_code(torch.compile(program, fullgraph=True), given["qkv"], *caches)
    assert_same((*got, *caches), (*want, *eager))
    assert [cache.data_ptr() for cache in caches] == places
    body = code[code.index("def call(") : code.index("def get_args")]
    assert len(re.findall(rf"torch\.ops\.cute\.{OP.name}\.default\(", body)) == 3
    assert not re.search(r"copy_|clone", body), body
