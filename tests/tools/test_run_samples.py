"""``tools/run_samples.py``, which normally runs under compute-sanitizer; here it runs the references on a CPU."""

import sys

import pytest
import torch
from support.cases import sample_cases
from support.programs import program_of

from torch_cute_ops.registry import OPS


@pytest.fixture(scope="session")
def program():
    return program_of("run_samples")


def run(program, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run_samples.py", "--device", "cpu", *arguments])
    program.main()


@pytest.mark.parametrize("op", ["add_rmsnorm_fp8quant", "fp4_dequantize", "mm_fp8_block", "moe_route"])
def test_samples_pass(program, monkeypatch, capsys, op):
    """Check that every sample is called, and that a CPU calls it only once."""
    run(program, monkeypatch, op)
    calls = int(capsys.readouterr().out.split()[0])
    assert calls == sum(case.values[0].name == op for case in sample_cases())


def test_parts_share_the_samples(program, monkeypatch, capsys):
    """Check that each sample belongs to exactly one part."""
    called, right = [], program.called
    monkeypatch.setattr(
        program, "called", lambda spec, sample, *rest: called.append(sample.name) or right(spec, sample, *rest)
    )
    run(program, monkeypatch, "moe_finalize")
    every = called.copy()
    called.clear()
    for part in ("1/3", "2/3", "3/3"):
        run(program, monkeypatch, "moe_finalize", "--part", part)
        assert called[-1] in every[int(part[0]) - 1 :: 3]
    assert len(every) > 3 and sorted(called) == sorted(every)
    counts = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert sum(counts[1:]) == counts[0] and max(counts[1:]) - min(counts[1:]) <= 1


def test_one_backend_alone(program, monkeypatch):
    """Check that on a CPU only the reference is called."""
    called = []
    monkeypatch.setattr(program, "called", lambda spec, sample, choice, results: called.append(choice) or results)
    run(program, monkeypatch, "--only", "cublas", "mm_fp4", "rmsnorm")
    assert not called
    run(program, monkeypatch, "--only", "reference", "mm_fp4", "rmsnorm")
    assert {"backend": "reference"} in called
    assert all(choice.get("backend", "reference") == "reference" for choice in called)
    with pytest.raises(SystemExit):
        run(program, monkeypatch, "mm_fp4", "--only", "referense")


@pytest.mark.parametrize("op", OPS)
def test_sums_of_fp8_products_may_lose(program, op):
    """Check that only GEMMs with FP8 activations are compared with the tolerance of FP8 tensor cores. GEMMs with FP4
    activations, whose scales may be FP8, are not."""
    spec = OPS[op]
    lost = {program.lost(spec, sample) is not None for sample in program.samples(spec, torch.device("cpu"))}
    assert lost == {op in ("mm_fp8", "mm_fp8_block", "grouped_mm_fp8", "mm_fp8_fp4", "grouped_mm_fp8_fp4")}


@pytest.mark.parametrize("op", ["fp4_quantize", "add_rmsnorm_fp8quant", "mm_fp4", "mm_fp8_block", "moe_route"])
def test_wrong_outputs_are_told(program, monkeypatch, op):
    """Check that wrong outputs are reported: set the first half of the first output to zero, and zeros to one, which
    exceeds any rounding error."""
    right = program.called

    def wrong(*args):
        outputs = right(*args)
        bytes_ = outputs[0].view(-1)[: (outputs[0].numel() + 1) // 2].view(torch.uint8)
        bytes_.copy_(torch.where(bytes_ == 0, 1, 0))
        return outputs

    monkeypatch.setattr(program, "called", wrong)
    with pytest.raises(SystemExit, match=rf"{op} .*% of \w+ differs"):
        run(program, monkeypatch, op)
