"""``interleave_k`` and ``deinterleave_k``: position of each element, and errors."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from torch_cute_ops import deinterleave_k, interleave_k


@pytest.mark.parametrize("shape", [(1, 256), (3, 64), (2, 3, 576), (0, 512), (700,)])
def test_positions(shape):
    *lead, k = shape
    a = torch.randint(0, 256, shape, dtype=torch.uint8)
    stored = interleave_k(a)
    assert stored.shape == (*lead, -(-k // 256), 256) and stored.is_contiguous()
    want = torch.zeros_like(stored)
    for element in range(k):
        group, within = divmod(element, 256)
        c, p, i, h, e = within // 64, within // 32 % 2, within // 8 % 4, within // 4 % 2, within % 4
        want[..., group, 128 * p + 32 * i + 16 * h + 4 * c + e] = a[..., element]
    assert torch.equal(stored, want)
    assert torch.equal(deinterleave_k(stored, k), a)
    fp8 = a.view(torch.float8_e4m3fn)
    assert torch.equal(interleave_k(fp8).view(torch.uint8), stored) and interleave_k(fp8).dtype == fp8.dtype


def test_strides_and_tracing():
    """Check rows that are not contiguous, fake tensors, and compiled code with several numbers of rows."""
    a = torch.randint(0, 256, (4, 1280), dtype=torch.uint8)
    part = a.t().contiguous().t()[::2, 64:640]
    assert torch.equal(interleave_k(part), interleave_k(part.contiguous()))
    stored = interleave_k(a)[:, 1::2]
    assert torch.equal(deinterleave_k(stored, 512), deinterleave_k(stored.contiguous(), 512))
    with FakeTensorMode() as mode:
        assert interleave_k(mode.from_tensor(a)).shape == (4, 5, 256)
    compiled = torch.compile(interleave_k, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 3):
        assert torch.equal(compiled(a[:rows]), interleave_k(a[:rows]))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: interleave_k(torch.zeros(2, 64)), TypeError, "interleave_k: got a with dtype torch.float32"),
        (lambda: interleave_k([1]), TypeError, "interleave_k: a is .*, a list; expected a tensor"),
        (lambda: interleave_k(torch.tensor(1, dtype=torch.uint8)), ValueError, r"interleave_k: got a with shape \(\)"),
        (
            lambda: deinterleave_k(torch.zeros(2, 1, 256, dtype=torch.uint8), 300),
            ValueError,
            r"deinterleave_k: got a with shape \(2, 1, 256\); expected \(..., 2, 256\), for k=300",
        ),
        (lambda: deinterleave_k(torch.zeros(256, dtype=torch.uint8), 256), ValueError, "expected .*⌈K/256⌉, 256"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()
