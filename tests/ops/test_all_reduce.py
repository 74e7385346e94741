"""Ops that sum rows over a group of GPUs, tested without a GPU: arguments of kernels, and calls in several launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_cute_ops
from torch_cute_ops.kernels import all_reduce_rows, row_quant
from torch_cute_ops.ops._all_reduce import ReducedRowLauncher
from torch_cute_ops.registry import OPS, kernels_of
from torch_cute_ops.runtime import groups
from torch_cute_ops.runtime.arch import ARCHS
from torch_cute_ops.runtime.argspec import Dim, TensorArg

WIDTH = 1024
ROOM = 300
"""Number of rows that fit into the group's shared memory."""
FORMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rounded": ("all_reduce_add_rmsnorm", {}, 300),
    "128x4": ("all_reduce_add_rmsnorm_fp4quant", {}, 256),
    "8x4": ("all_reduce_add_rmsnorm_fp4quant", {"scale_layout": "8x4"}, 296),
    "linear": ("all_reduce_add_rmsnorm_fp4quant", {"scale_layout": "linear", "block_size": 32}, 300),
    "token": ("all_reduce_add_rmsnorm_fp8quant", {}, 300),
    "column": ("all_reduce_add_rmsnorm_fp8quant", {"granularity": "block128"}, 300),
}
"""Op, arguments, and number of rows of the first launch."""


class Memory:
    """Stand-in for ``groups.SharedMemory`` with two ranks."""

    slot_bytes = ROOM * WIDTH * 2 + 14
    arguments = 1, "staging", "slot", *(None,) * 6, "control", "report", 5

    def __init__(self) -> None:
        self.entered = 0

    def enter(self) -> None:
        self.entered += 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 700])
def test_launches(form: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each row is passed to one launch, with its residual and outputs, in the layouts that the kernel
    takes."""
    name, given, most = FORMS[form]
    memory, calls = Memory(), []
    monkeypatch.setattr(groups, "shared_memory", lambda group, device: memory)
    op = OPS[name]
    x = torch.arange(rows).float()[:, None].expand(-1, WIDTH).to(torch.float16)
    residual = torch.zeros_like(x).contiguous()
    call = op.bind(x.contiguous(), residual, torch.ones(WIDTH), "2 ranks", **given)
    kernel = op.path.kernel(call, ARCHS["sm_90a"])
    specs = kernel.make().arguments()

    def launch(*given: Any) -> None:
        """Act as the compiled function: check the arguments, and mark rows of residual and outputs by the input."""
        called = all_reduce_rows.Arguments(*given)
        check_arguments(called, specs)
        calls.append(called)
        called.residual.copy_(called.input)
        for output in (called.y, called.norm):
            if output is not None:
                output.copy_((called.input % 100)[:, : output.shape[1]].to(output.dtype))
        if form in ("token", "column"):
            called.scale.copy_(called.input[:, :1].float())
        elif called.scale is not None:
            called.scale.view(torch.uint8).fill_(len(calls))

    launcher = ReducedRowLauncher(kernel, launch, torch.device("cpu"), 132)
    launcher.group = "2 ranks"
    op.path.check_call(call)
    out = op.path.empty_outputs(call)
    launcher.launch(call, out)
    outputs = out if isinstance(out, tuple) else (out,)
    assert memory.entered == 1
    assert [called.input.shape[0] for called in calls] == [most] * (rows // most) + [rows % most]
    assert torch.equal(residual, x)
    assert torch.equal(outputs[0].float(), (x % 100).to(outputs[0].dtype).float()[:, : outputs[0].shape[1]])
    assert all(called.max_ctas == 132 and called.timeout_ms == 5 and called.rank == 1 for called in calls)
    if form in ("token", "column"):
        assert torch.equal(outputs[1], x[:, : outputs[1].shape[1]].float())
    elif len(outputs) > 1:
        tile = {"128x4": 128, "8x4": 8}.get(form, 1)
        parts = [-(-called.input.shape[0] // tile) for called in calls]
        marks = torch.arange(1, len(calls) + 1).repeat_interleave(torch.tensor(parts))
        assert torch.equal(outputs[1].view(torch.uint8).flatten(1).amax(1).long(), marks)


def check_arguments(called: all_reduce_rows.Arguments, specs: all_reduce_rows.Arguments) -> None:
    dims: dict[str, int] = {}
    for name, value, spec in zip(called._fields, called, specs, strict=True):
        assert (value is None) == (spec is None), name
        if isinstance(spec, TensorArg) and isinstance(value, torch.Tensor):
            for size, extent in zip((*value.shape, *value.stride()), (*spec.shape, *spec.stride), strict=True):
                expected = dims.setdefault(extent.name, size) if isinstance(extent, Dim) else extent
                assert size == expected, (name, value.shape, value.stride())


def test_rows_too_wide_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a call is refused if the 128 rows of a scale tile do not fit into the group's memory."""
    memory = Memory()
    memory.slot_bytes = 127 * WIDTH * 2
    monkeypatch.setattr(groups, "shared_memory", lambda group, device: memory)
    op = OPS["all_reduce_add_rmsnorm_fp4quant"]
    x = torch.zeros(4, WIDTH, dtype=torch.float16)
    call = op.bind(x, x.clone(), torch.ones(WIDTH), "2 ranks")
    kernel = op.path.kernel(call, ARCHS["sm_90a"])
    launcher = ReducedRowLauncher(kernel, lambda *given: pytest.fail("launched"), torch.device("cpu"), 132)
    launcher.group = "2 ranks"
    with pytest.raises(ValueError, match="128 rows of 1024 elements do not fit into the 260096 bytes"):
        launcher.launch(call, op.path.empty_outputs(call))


def test_kernel_by_ranks() -> None:
    """Check which kernel serves which number of ranks, and that ``precompile`` accepts the number as a property."""
    given = {"hidden": 8192, "dtype": torch.bfloat16}
    (alone,) = kernels_of("all_reduce_add_rmsnorm_fp4quant", "sm_90a", **given)
    (plain,) = kernels_of("add_rmsnorm_fp4quant", "sm_90a", **given)
    assert alone == plain and alone.kernel == row_quant.KERNEL
    (four,) = kernels_of("all_reduce_add_rmsnorm_fp4quant", "sm_90a", **given, ranks=4)
    assert four.kernel == all_reduce_rows.KERNEL and four.config.ranks == 4 and four.config.rows == plain.config
    with pytest.raises(ValueError, match="2 to 8 GPUs; the group has 9"):
        kernels_of("all_reduce_add_rmsnorm", "sm_90a", **given, ranks=9)


def test_launchers_are_kept_by_group() -> None:
    op = OPS["all_reduce_add_rmsnorm"]
    x = torch.zeros(4, 64)
    one, other = (op.bind(x, x, torch.ones(64), name) for name in ("2 ranks", "3 ranks"))
    assert op.path.key(one, 0) != op.path.key(other, 0)


def test_one_rank_is_the_op_without_the_sum() -> None:
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    other = residual.clone()
    got = torch_cute_ops.all_reduce_add_rmsnorm(x, residual, torch.ones(64), "")
    assert torch.equal(got, torch_cute_ops.add_rmsnorm(x, other, torch.ones(64)))
    assert torch.equal(residual, other)
