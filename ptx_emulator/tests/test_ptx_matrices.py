"""Test ``ldmatrix``, ``movmatrix``, ``mma`` and ``wgmma`` in small programs."""

import re

import numpy as np
import pytest
import torch
from programs import HALVES, SEEDS, SLOT, entry, launch, zeros

from ptx_emulator import Deadlock, EmulationError, Misaligned, OutOfBounds, Race, Uninitialised


def lane_words(count: int, pointer: str = "%rd0") -> str:
    """Return code that computes the address of the first of this thread's ``count`` words in %rd9."""
    return f"mul.wide.u32 %rd8, %r0, {4 * count}; add.s64 %rd9, {pointer}, %rd8;"


def registers(first: int, end: int) -> str:
    return "{" + ", ".join(f"%r{i}" for i in range(first, end)) + "}"


STORE = f"st.global.v4.b32 [%rd9], {registers(30, 34)};"


def product(k: int, half: str, before: str = "", after: str = "", store: str = STORE) -> str:
    """Return a program in which each warp multiplies matrices. A lane's words of A, B and C are in ``p0``; results go
    to ``p1``."""
    b, c = 10 + k // 4, 10 + k // 4 + k // 8
    loads = "".join(f"ld.global.b32 %r{10 + i}, [%rd9+{4 * i}];" for i in range(c - 6))
    body = f"""
    {lane_words(c - 6)} {loads}
    {before}
    mma.sync.aligned.m16n8k{k}.row.col.f32.{half}.{half}.f32
        {registers(30, 34)}, {registers(10, b)}, {registers(b, c)}, {registers(c, c + 4)};
    {after}
    {lane_words(4, "%rd1")}
    {store}
    """
    return entry(body, 128)


def fragments(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> np.ndarray:
    """Return the words of A, B and C that each lane holds, following the tables of the PTX ISA."""
    words = []
    for lane in range(32):
        group, pair = lane >> 2, lane % 4
        elements = []
        for i in range(a.shape[1] // 2):
            elements.append(a[group + 8 * (i % 4 >= 2), pair * 2 + (i & 1) + 8 * (i >= 4)])
        for i in range(b.shape[0] // 4):
            elements.append(b[pair * 2 + (i & 1) + 8 * (i >= 2), group])
        sums = [c[group + 8 * (i >= 2), pair * 2 + (i & 1)] for i in range(4)]
        words.append(torch.stack(elements).view(torch.int32))
        words.append(torch.stack(sums).view(torch.int32))
    return torch.cat(words).numpy().view(np.uint32)


def matrices(k: int, half: str) -> tuple[torch.Tensor, ...]:
    """Return random matrices of integers, so that every sum is exact."""
    dtype = HALVES[half][0]
    a, b = torch.randint(-100, 101, (16, k)).to(dtype), torch.randint(-100, 101, (k, 8)).to(dtype)
    return a, b, torch.randint(-(2**20), 2**20, (16, 8)).float()


def of_lanes(words: np.ndarray) -> torch.Tensor:
    """Assemble the 16×8 matrix of each warp from the lanes' results."""
    lanes = torch.from_numpy(words).view(torch.float32).reshape(-1, 8, 4, 2, 2)
    return lanes.permute(0, 3, 1, 2, 4).reshape(-1, 16, 8)


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("k", [8, 16])
def test_mma(k: int, half: str) -> None:
    warps = [matrices(k, half) for _ in range(3)]
    words = np.concatenate([fragments(*warp) for warp in warps])
    (_, out) = launch(product(k, half), words, zeros(3 * 128), block=96)
    assert torch.equal(of_lanes(out), torch.stack([a.float() @ b.float() + c for a, b, c in warps]))
    # Also test infinities, NaN, and fractions, whose sums are rounded once.
    a, b, c = (torch.randn_like(x) for x in warps[0])
    a[3, 2], c[5, 1] = torch.inf, torch.nan
    want = a.double() @ b.double() + c.double()
    (_, out) = launch(product(k, half), fragments(a, b, c), zeros(128))
    assert torch.equal(of_lanes(out)[0].nan_to_num(7.0), want.float().nan_to_num(7.0))
    # All NaN results have the NaN bits of the hardware.
    words = out[np.isnan(out.view(np.float32))]
    assert words.tolist() == [0x7FFFFFFF] * int(want.isnan().sum())


def test_mma_of_bytes() -> None:
    """Check MMAs of bytes, in which lane 4 g + t holds elements 4 t to 4 t + 3 of a row of A or a column of B."""
    a, b, c = (torch.randint(-8, 9, shape).float() for shape in ((16, 32), (32, 8), (16, 8)))
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    words = []
    for lane in range(32):
        group, pair = lane >> 2, lane % 4
        neighbours = [slice(4 * pair + 16 * i, 4 * pair + 16 * i + 4) for i in range(2)]
        of_a = [a[group + 8 * (i % 2), neighbours[i // 2]] for i in range(4)]
        of_b = [b[where, group] for where in neighbours]
        words.append(torch.cat([part.view(torch.uint8) for part in (*of_a, *of_b)]).view(torch.int32))
        words.append(torch.stack([c[group + 8 * (i >= 2), pair * 2 + (i & 1)] for i in range(4)]).view(torch.int32))
    program = product(16, "f16").replace("m16n8k16.row.col.f32.f16.f16.f32", "m16n8k32.row.col.f32.e4m3.e4m3.f32")
    (_, out) = launch(program, torch.cat(words).numpy().view(np.uint32), zeros(128))
    assert torch.equal(of_lanes(out)[0], a.float() @ b.float() + c)


def test_wrong_products() -> None:
    words = fragments(*matrices(16, "f16"))
    with pytest.raises(EmulationError, match=r"fewer than 32 threads; CTA 0, thread 32; .*mma\.sync"):
        launch(product(16, "f16"), np.tile(words, 2), zeros(256), block=48)
    with pytest.raises(Deadlock, match=r"31 threads .*mma\.sync"):
        launch(product(16, "f16", "setp.eq.u32 %p0, %r0, 5; @%p0 bra END;", "END:"), words, zeros(128))
    # Lanes at two different mma instructions do not meet, so both groups wait forever.
    mma = re.search(r"mma[^;]*;", product(16, "f16"))[0]
    with pytest.raises(Deadlock, match=r"16 threads .*mma\.sync.*\n.*16 threads .*mma\.sync"):
        two = product(16, "f16", "setp.lt.u32 %p0, %r0, 16; @%p0 bra OTHER;", f"bra END; OTHER: {mma} END:")
        launch(two, words, zeros(128))
    for form in ("m16n8k16.row.col.f16.f16.f16.f16", "m16n8k32.row.col.f32.e5m2.e5m2.f32", "m16n8k16.row.row.f32"):
        with pytest.raises(NotImplementedError, match=form):
            launch(product(16, "f16").replace("m16n8k16.row.col.f32.f16.f16.f32", form), words, zeros(128))


@pytest.mark.parametrize(
    ("register", "lane", "results", "lanes"), [(11, 13, (2, 3), range(12, 16)), (15, 9, (0, 2), range(1, 32, 4))]
)
def test_products_of_what_nobody_wrote(register: int, lane: int, results: tuple, lanes: range) -> None:
    """Check that an uninitialised word of A makes only row 11 of the result undefined, and an uninitialised word of B
    only column 2."""
    words = fragments(*matrices(16, "f16"))
    hole = f"{SLOT} setp.eq.u32 %p0, %r0, {lane}; @%p0 ld.shared.b32 %r{register}, [%r9];"
    for result in range(4):
        for reader in (0, 1, 5, 9, 11, 12, 13, 15, 16, 29):
            store = f"setp.eq.u32 %p1, %r0, {reader}; @%p1 st.global.b32 [%rd9], %r{30 + result};"
            program = product(16, "f16", hole, store=store)
            if result in results and reader in lanes:
                with pytest.raises(Uninitialised, match=f"thread {reader};"):
                    launch(program, words, zeros(128))
            else:
                launch(program, words, zeros(128))


def test_warpgroup_products_of_what_nobody_wrote() -> None:
    """Check that an uninitialised row of B makes only its column of the result undefined.

    In the first MMA, row 5 of B is uninitialised. In a second MMA, which adds to the same accumulators, row 2 of B is
    uninitialised. In each quad of lanes, the third lane holds column 5, and the second lane holds column 2.
    """
    sums, ones = registers(30, 34), "{" + ", ".join(["%r20"] * 4) + "}"
    multiply = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {sums}, {ones}, %rd9, %p2, 1, 1, 0;"
    for lane, result in ((0, 1), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (33, 2), (34, 1), (34, 2), (34, 3), (35, 1)):
        body = f"""
        mov.u32 %r9, buf; mad.lo.u32 %r9, %r0, 32, %r9; mov.b32 %r20, 0x3C003C00;
        shr.u32 %r7, %r0, 2; setp.ne.u32 %p0, %r7, 5; setp.ne.and.u32 %p0, %r7, 10, %p0;
        {"".join(f"@%p0 st.shared.b32 [%r9+{4 * i}], %r20;" for i in range(8))}
        {"".join(f"mov.b32 %r{30 + i}, 0;" for i in range(4))}
        fence.proxy.async.shared::cta; bar.sync 0;
        mov.u32 %r8, buf; shr.u32 %r8, %r8, 4; cvt.u64.u32 %rd9, %r8; or.b64 %rd9, %rd9, {1 << 62};
        setp.eq.u32 %p2, %r20, %r20;
        wgmma.fence.sync.aligned;
        {multiply} add.s64 %rd9, %rd9, {1024 >> 4}; {multiply}
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        setp.eq.u32 %p3, %r0, {lane}; @%p3 st.global.b32 [%rd0], %r{30 + result};
        """
        program = entry(body, 4096, params=1)
        if (lane % 4, result % 2) in ((2, 1), (1, 0)):
            with pytest.raises(Uninitialised, match=f"thread {lane};"):
                launch(program, zeros(1), block=128)
        else:
            assert launch(program, zeros(1), block=128)[0].view(np.float32).tolist() == [32.0]


@pytest.mark.parametrize("row", [0, 17, 49])
def test_a_warp_of_a_warpgroup_races(row: int) -> None:
    """Check that, if a thread stores a row without a fence, the error names the warp that multiplies this row."""
    sums, writer = registers(30, 34), row // 16 * 32 + 9
    body = f"""
    mov.u32 %r9, buf; mad.lo.u32 %r8, %r0, 80, %r9;
    {"".join(f"st.shared.b32 [%r8+{4 * i}], 0;" for i in range(20))}
    {"".join(f"mov.b32 %r{30 + i}, 0;" for i in range(4))}
    fence.proxy.async.shared::cta; bar.sync 0;
    setp.eq.u32 %p0, %r0, {writer}; @%p0 st.shared.b32 [%r9+{128 * row}], %r0;
    shr.u32 %r8, %r9, 4; cvt.u64.u32 %rd9, %r8; or.b64 %rd9, %rd9, {1 << 62 | 64 << 32};
    add.s64 %rd8, %rd9, {8192 >> 4}; setp.eq.u32 %p2, %r0, %r0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {sums}, %rd9, %rd8, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    """
    with pytest.raises(Race, match=f"thread {writer} of CTA 0 wrote .*, thread {row // 16 * 32};"):
        launch(entry(body, 10240, params=1), zeros(1), block=128)


def matrix_loads(form: str, between: str = "bar.warp.sync -1;", after: str = "", offset: int = 0) -> str:
    """Return a program in which each warp stores 32 rows of 16 bytes and then loads matrices from them.

    Lane ``i`` passes the address of row ``5 i + 3`` to ``ldmatrix``.
    """
    count = int(form[1])
    body = f"""
    {lane_words(4)} ld.global.v4.b32 {registers(10, 14)}, [%rd9];
    mov.u32 %r9, buf; mad.lo.u32 %r9, %r0, 16, %r9;
    st.shared.v4.b32 [%r9], {registers(10, 14)};
    {between}
    mad.lo.u32 %r7, %r0, 5, 3; and.b32 %r7, %r7, 31; and.b32 %r6, %r0, 32; or.b32 %r7, %r7, %r6;
    shl.b32 %r7, %r7, 4; mov.u32 %r6, buf; add.u32 %r7, %r7, %r6; add.u32 %r7, %r7, {offset};
    mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0; mov.b32 %r23, 0;
    ldmatrix.sync.aligned.m8n8.{form}.b16 {registers(20, 20 + count)}, [%r7];
    {after}
    {lane_words(4, "%rd1")} st.global.v4.b32 [%rd9], {registers(20, 24)};
    """
    return entry(body, 1024)


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("form", ["x1.shared", "x2.shared::cta", "x4.shared", "x1.trans.shared", "x4.trans.shared"])
def test_ldmatrix(form: str, seed: int | None) -> None:
    halves = np.arange(64 * 8, dtype=np.uint16) * 31
    (_, out) = launch(matrix_loads(form), halves, zeros(256), block=64, seed=seed, strict=True)
    rows = halves.reshape(2, 32, 8)[:, (5 * np.arange(32) + 3) % 32].reshape(2, 4, 8, 8)
    found = out.reshape(2, 32, 4).view(np.uint16).reshape(2, 8, 4, 4, 2)
    for i in range(4):
        want = rows[:, i].swapaxes(1, 2) if "trans" in form else rows[:, i]
        got = found[:, :, :, i].reshape(2, 8, 8)
        assert (got == (want if i < int(form[1]) else 0)).all()


FP4_FORM = "m8n16.x4.shared.b8x16.b4x16_p64"


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_ldmatrix_of_codes_of_4_bits(seed: int | None) -> None:
    """Check that the first 8 bytes of each row become 16 bytes, and that the 8 bytes that follow are not read."""
    codes = np.random.default_rng(0).integers(0, 16, (64, 16), np.uint8)
    rows = np.full((64, 16), 0xFF, np.uint8)
    rows[:, :8] = codes[:, ::2] | codes[:, 1::2] << 4
    text = matrix_loads("x4").replace("m8n8.x4.b16", FP4_FORM)
    assert FP4_FORM in text
    (_, out) = launch(text, rows.reshape(-1).view(np.uint32), zeros(256), block=64, seed=seed, strict=True)
    found = out.view(np.uint8).reshape(2, 8, 4, 4, 4)  # warp, row, lane of the row, matrix, byte
    want = codes.reshape(2, 32, 16)[:, (5 * np.arange(32) + 3) % 32].reshape(2, 4, 8, 4, 4)
    assert np.array_equal(found, want.transpose(0, 2, 3, 1, 4))


def test_ldmatrix_of_codes_of_4_bits_reads_no_padding() -> None:
    rows = np.zeros((64, 4), np.uint32)
    text = matrix_loads("x4").replace("m8n8.x4.b16", FP4_FORM)
    stores = f"st.shared.v4.b32 [%r9], {registers(10, 14)};"
    for store, fails in (
        (f"st.shared.v2.b32 [%r9], {registers(10, 12)};", False),
        ("st.shared.b32 [%r9], %r10;", True),
    ):
        changed = text.replace(stores, store)
        if fails:
            with pytest.raises(Uninitialised):
                launch(changed, rows.reshape(-1), zeros(256), block=64)
        else:
            launch(changed, rows.reshape(-1), zeros(256), block=64)
    with pytest.raises(Misaligned):
        launch(text.replace("add.u32 %r7, %r7, 0;", "add.u32 %r7, %r7, 8;"), rows.reshape(-1), zeros(256), block=64)
    for form in ("m8n16.x4.shared.b16", "m8n16.x4.trans.shared.b8x16.b4x16_p64", "m8n16.x4.shared.b8x16.b6x16_p32"):
        with pytest.raises(NotImplementedError):
            launch(matrix_loads("x4").replace("m8n8.x4.b16", form), rows.reshape(-1), zeros(256), block=64)


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_ldmatrix_races(seed: int | None) -> None:
    data = np.arange(64 * 4, dtype=np.uint32)
    # ldmatrix races with the stores if no barrier separates them. An mma between the stores and ldmatrix is no barrier:
    # all lanes execute the mma together, but it orders no memory accesses.
    product = f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {registers(20, 24)},"
    product += "{%r10, %r11}, {%r12}, {%r13, %r13, %r13, %r13};"
    for between in ("", product):
        with pytest.raises(Race, match=r"read of .*ldmatrix"):
            launch(matrix_loads("x4.shared", between), data, zeros(256), block=64, seed=seed)
    # ldmatrix with x1 reads only the rows whose addresses lanes 0 to 7 pass: it reads lane 0's row 3, and not lane 8's
    # row 11.
    again = "setp.ne.u32 %p0, %r0, LANE; @%p0 bra END; st.shared.u32 [%r9], %r0; END:"
    with pytest.raises(Race, match=r"write of .* thread 0 of CTA 0 read"):
        launch(matrix_loads("x1.shared", after=again.replace("LANE", "3")), data, zeros(256), block=64, seed=seed)
    launch(matrix_loads("x1.shared", after=again.replace("LANE", "11")), data, zeros(256), block=64, seed=seed)
    ordered = "bar.warp.sync -1;" + again.replace("LANE", "3")
    launch(matrix_loads("x1.shared", after=ordered), data, zeros(256), block=64, seed=seed)


def test_wrong_ldmatrix() -> None:
    data = np.arange(64 * 4, dtype=np.uint32)
    for offset, error in ((8, Misaligned), (512, OutOfBounds), (-4096, OutOfBounds)):
        with pytest.raises(error, match="ldmatrix"):
            launch(matrix_loads("x4.shared", offset=offset), data, zeros(256), block=64)
    with pytest.raises(EmulationError, match="fewer than 32 threads"):
        launch(matrix_loads("x1.shared"), data, zeros(256), block=16)
    with pytest.raises(Deadlock, match="ldmatrix"):
        skip = "setp.eq.u32 %p0, %r0, 31; @%p0 bra END;"
        launch(matrix_loads("x1.shared", "bar.warp.sync -1;" + skip, "END:"), data, zeros(256))
    for form in ("x1.shared.b8x16", "x2.m16n16.shared"):
        with pytest.raises(NotImplementedError, match="ldmatrix"):
            launch(matrix_loads(form), data, zeros(256))


@pytest.mark.parametrize(("form", "lanes"), [("x1.shared", range(12, 16)), ("x1.trans.shared", range(1, 32, 4))])
def test_matrices_that_nobody_wrote(form: str, lanes: range) -> None:
    """Check that lanes whose results do not depend on the matrix's uninitialised row 3 may store these results."""
    data = np.arange(32 * 4, dtype=np.uint32)
    program = matrix_loads(form).replace("st.shared.v4", "setp.ne.u32 %p1, %r0, 18; @%p1 st.shared.v4")
    for lane in (0, 1, 5, 11, 12, 15, 16, 30):
        only = f"setp.eq.u32 %p0, %r0, {lane}; @%p0 st.global.v4"
        one = program.replace("st.global.v4", only)
        if lane in lanes:
            with pytest.raises(Uninitialised, match=f"thread {lane};"):
                launch(one, data, zeros(128))
        else:
            launch(one, data, zeros(128))
