"""Dumps of calls: their contents, when they are written, and the results of replays."""

import json
import os
import platform
import sys

import pytest
import torch
from expected import raw
from safetensors import safe_open
from support.cases import arguments, copy_updated, get_sample, op_cases, overload, sample_cases
from support.interpreters import forked
from torch import distributed

import torch_cute_ops
from torch_cute_ops.cli.main import main
from torch_cute_ops.dump import KEY, Dump, DumpError, Recorder, replay
from torch_cute_ops.ops._define import as_tuple
from torch_cute_ops.registry import OPS
from torch_cute_ops.runtime import settings

CPU = torch.device("cpu")
SAMPLES = 8


def recorder_of(op, folder, limit=2**30):
    return Recorder(OPS[op], folder, limit)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


@pytest.mark.parametrize("op", op_cases())
def test_a_replay_gives_the_same_bits(op, tmp_path):
    """Check, for samples of all kinds, that a replay restores the dtype, shape, strides and alignment of each tensor,
    and that the op then returns the same bits."""
    every = [get_sample(op, case.values[1], "cpu") for case in sample_cases() if case.values[0] is op]
    every = [each for each in every if each.args[0].numel() < 2**16]
    recorder = recorder_of(op.name, tmp_path)
    for sample in every[:: max(1, len(every) // SAMPLES)]:
        sample = copy_updated(op, sample)
        given = op.path.arguments(op.bind(**arguments(op, sample)))
        recorder.record((), arguments(op, sample))
        dump = Dump.read(recorder.path)
        back = dump.arguments(CPU)
        assert list(back) == list(given) and not dump.missing
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                assert same_bits(value, back[name]) and value.stride() == back[name].stride(), name
                assert value.data_ptr() % 16 == back[name].data_ptr() % 16 or value.data_ptr() % value.itemsize, name
            else:
                assert value == back[name] and type(value) is type(back[name]), name
        want = as_tuple(overload(op)(**arguments(op, sample)))
        call, _, outputs = replay(dump, op, CPU)
        assert all(map(same_bits, outputs, want))
        for name in op.updated:  # the updated argument itself was changed after the dump
            if given[name] is not None:
                assert same_bits(op.path.arguments(call)[name], given[name])


def test_what_a_dump_says(tmp_path):
    recorder = recorder_of("add_rmsnorm_fp4quant", tmp_path)
    x, weight = torch.randn(5, 64), torch.ones(64)
    recorder.record((x, x[:1].expand(5, 64), weight), {"eps": 1e-5, "scale_layout": "linear"})
    with safe_open(str(recorder.path), "pt") as file:
        about = json.loads(file.metadata()[KEY])
        assert sorted(file.keys()) == ["input", "residual", "weight"]
        assert torch.equal(file.get_tensor("input"), x) and torch.equal(file.get_tensor("residual"), x[:1])
    assert about["op"] == "add_rmsnorm_fp4quant" and about["schema"].startswith("add_rmsnorm_fp4quant(Tensor input")
    assert about["versions"]["torch"] == torch.__version__ and len(about["versions"]["sources"]) == 64
    assert about["arguments"]["eps"] == 1e-5 and about["arguments"]["scale_layout"] == "linear"
    assert about["arguments"]["residual"]["stride"] == [0, 1] and about["tactic"] is None
    assert recorder.path.stat().st_mode & 0o777 == 0o600
    recorder.record((x[:2], x[:2].clone(), weight), {})
    assert Dump.read(recorder.path).about["number"] > about["number"]
    assert len(list(tmp_path.iterdir())) == 1


def test_one_tensor_twice(tmp_path):
    """Check that arguments that are the same tensor are stored once, and are one tensor again in a replay."""
    recorder, x = recorder_of("add_rmsnorm", tmp_path), torch.randn(3, 64)
    recorder.record((x, x, torch.ones(64)), {})
    dump = Dump.read(recorder.path)
    back = dump.arguments(CPU)
    assert back["input"] is back["residual"] and len(dump.stored) == 2 and not dump.missing


def test_the_largest_tensors_are_left_out(tmp_path):
    recorder = recorder_of("rmsnorm", tmp_path, limit=400)
    x, weight = torch.randn(5, 64, dtype=torch.bfloat16), torch.ones(64)
    recorder.record((x, weight), {})
    dump = Dump.read(recorder.path)
    assert dump.missing == ["input"] and list(dump.stored) == ["weight"]
    back = dump.arguments(CPU)["input"]
    assert back.shape == x.shape and back.dtype == x.dtype and not back.any()


def test_given_outputs(tmp_path):
    """Check that a call of ``.out`` is replayed as a call of ``.out``, with outputs of the same strides."""
    recorder, x = recorder_of("fp8_quantize", tmp_path), torch.randn(5, 256)
    y, scale = torch.empty(5, 256, dtype=torch.float8_e4m3fn), torch.empty(2, 8).t()[:5]
    outputs = dict(zip(OPS["fp8_quantize"].out_names, (y, scale), strict=True))
    recorder.record((x,), {"granularity": "block128", **outputs})
    dump = Dump.read(recorder.path)
    assert dump.about["schema"].startswith("fp8_quantize.out(") and [*dump.stored] == ["input"]
    _, _, got = replay(dump, OPS["fp8_quantize"], CPU)
    assert got[1].stride() == (1, 8)
    assert all(map(same_bits, got, torch_cute_ops.fp8_quantize(x, granularity="block128")))


def test_shapes_alone_under_capture(tmp_path, monkeypatch):
    """Check that no tensor is copied during a capture, because contents cannot be read then."""
    x = torch.zeros(5, 64, device="meta")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "to", lambda *args, **kwargs: pytest.fail("copied"))
    described, stored = recorder_of("rmsnorm", tmp_path)._described({"input": x, "eps": float("inf")}, 2**30)
    assert described["input"]["shape"] == [5, 64] and not described["input"]["stored"] and not stored
    assert described["eps"] == {"float": "inf"}


def test_a_failed_copy_keeps_the_last_dump(tmp_path, monkeypatch, caplog):
    """Check that, if tensors cannot be read after a CUDA error, the call raises its own error, and the log does not
    name the previous call's dump. If the next call fails too, the log names the dump of this call."""
    recorder, x = recorder_of("rmsnorm", tmp_path), torch.randn(5, 64)
    recorder.record((x, torch.ones(64)), {})
    before = recorder.path.read_bytes()

    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", fail)
        with pytest.raises(KeyError, match="of the op"):
            recorder.recorded(lambda *args: {}["of the op"])(x, torch.ones(64))
    assert recorder.path.read_bytes() == before
    assert "the call is not dumped: RuntimeError: CUDA error" in caplog.text
    assert "cute::rmsnorm failed; the call was not dumped" in caplog.text and str(recorder.path) not in caplog.text
    with pytest.raises(KeyError, match="of the op"):
        recorder.recorded(lambda *args: {}["of the op"])(x, torch.ones(64))
    assert recorder.path.read_bytes() != before
    assert caplog.messages[-1] == f"cute::rmsnorm failed; the call's dump is {recorder.path}"


@pytest.mark.parametrize(
    ("host", "rank", "name"),
    [
        ("node-7.lan", None, "node-7.lan-{pid}"),
        ("node-7.lan", "12", "node-7.lan-rank12-{pid}"),
        ("a/../b c", "../3", "a_.._b_c-{pid}"),
        ("", "0", "host-rank0-{pid}"),
    ],
)
def test_the_name_of_a_dump(host, rank, name, tmp_path, monkeypatch):
    """Check that neither two hosts nor two ranks write to the same file of a shared folder."""
    monkeypatch.setattr(platform, "node", lambda: host)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    path = recorder_of("rmsnorm", tmp_path).path
    assert path == tmp_path / f"rmsnorm-{name.format(pid=os.getpid())}.safetensors"


def test_the_rank_of_a_process_group(tmp_path, monkeypatch):
    """Check that, without torchrun's variable, the rank in the name is the rank in the process group."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 5)
    assert recorder_of("rmsnorm", tmp_path).path.name.endswith(f"-rank5-{os.getpid()}.safetensors")


def test_links_are_not_followed(tmp_path):
    """Check that a link with the name of a dump is replaced, and that the file it leads to stays."""
    other, recorder = tmp_path / "other", recorder_of("rmsnorm", tmp_path / "dumps")
    other.write_bytes(b"valuable")
    recorder.folder.mkdir()
    recorder.path.symlink_to(other)
    assert recorder.record((torch.randn(5, 64), torch.ones(64)), {})
    assert other.read_bytes() == b"valuable" and not recorder.path.is_symlink()
    assert Dump.read(recorder.path).about["op"] == "rmsnorm"


PROGRAM = """
import os, torch, torch_cute_ops
x, weight = torch.randn(4, 64), torch.ones(64)
torch_cute_ops.rmsnorm(x, weight)
torch.ops.cute.fp4_quantize.default(x)
torch_cute_ops.rmsnorm(x[:3], weight, out=torch.empty(3, 64))
try:
    torch_cute_ops.rmsnorm(x[:2], weight[:5])
except ValueError:
    os.abort()
"""


def test_the_setting(tmp_path):
    """Check that the last call of each op, even a failed call, can be read after the process is killed, and that
    without the setting no module for dumps is imported."""
    done = forked(PROGRAM, TORCH_CUTE_OPS_DUMP=str(tmp_path / "dumps"))
    assert done.returncode < 0, done.stderr
    norm, quantize = (
        Dump.read(next((tmp_path / "dumps").glob(f"{op}-*.safetensors"))) for op in ("rmsnorm", "fp4_quantize")
    )
    assert norm.arguments(CPU)["weight"].shape == (5,) and norm.arguments(CPU)["input"].shape == (2, 64)
    assert quantize.about["number"] == 2 and norm.about["number"] == 4
    assert torch.equal(quantize.arguments(CPU)["input"][:2], norm.arguments(CPU)["input"])
    code = "import sys, torch_cute_ops; print([m for m in sys.modules if 'safetensors' in m or 'dump' in m])"
    assert forked(code).stdout == "[]\n"
    assert settings.DUMP is None and "torch_cute_ops.dump" in sys.modules


# The command


@pytest.fixture
def dumped(tmp_path):
    """Return the dump of a GEMM."""
    recorder = recorder_of("mm_fp4_weight_only", tmp_path)
    x, w = torch.randn(5, 128, dtype=torch.bfloat16), torch_cute_ops.quantize(torch.randn(64, 128), "nvfp4")
    recorder.record((x, w.codes.t(), w.scale), {"alpha": 1 / w.global_scale, "backend": "auto"})
    return recorder.path


def test_replay_command(dumped, capsys):
    assert main(["replay", str(dumped), "--against", "reference"]) == 0
    shown = capsys.readouterr().out
    assert "cute::mm_fp4_weight_only, call" in shown and "out: bfloat16[5, 64] on cpu, SHA-256 " in shown
    assert shown.endswith("equals the reference, within the op's error bounds\n") and "then" not in shown
    assert main(["replay", str(dumped), "--backend", "reference"]) == 0
    assert "reference" not in capsys.readouterr().out
    assert main(["replay", str(dumped), "--backend", "wgmma"]) == 1
    assert "backend 'wgmma': needs a CUDA device" in capsys.readouterr().err


def test_replay_of_a_call_that_fails(tmp_path, capsys):
    """Check that a replay shows the call's error, of any class, without a traceback, and exits with status 1."""
    recorder, x = recorder_of("mm_fp8", tmp_path), torch.randn(16, 16)
    recorder.record((x, x, x, x), {})
    assert main(["replay", str(recorder.path), "--against", "reference"]) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: TypeError: cute::mm_fp8: got a with dtype float32; expected float8_e4m3fn\n"
    assert shown.out.startswith("cute::mm_fp8, call") and "reference" not in shown.out


def test_replay_says_where_the_result_differs(dumped, capsys, monkeypatch):
    """Check that a single wrong element in any row is found, and that differing versions are named."""
    real = replay

    def wrong(*args):
        call, old, (out,) = real(*args)
        out[3, 41] += 100
        return call, old, (out,)

    monkeypatch.setattr("torch_cute_ops.dump.replay", wrong)
    monkeypatch.setattr("torch_cute_ops.dump.versions", lambda: {"torch": "0.1"})
    assert main(["replay", str(dumped), "--against", "reference"]) == 1
    shown = capsys.readouterr().out
    assert "differs from the reference: out is wrong: 1 of 320 compared elements differ; the first, at [3, 41]" in shown
    assert f"  torch: then {torch.__version__}, here 0.1\n" in shown


def test_wrong_files(tmp_path, dumped, capsys):
    other = tmp_path / "other.safetensors"
    for content, message in ((b"", "is no dump of a call"), (b"\xff" * 100, "is no dump of a call"), (None, "no file")):
        if content is None:
            other.unlink()
        else:
            other.write_bytes(content)
        assert main(["replay", str(other)]) == 1
        assert message in capsys.readouterr().err
    content = dumped.read_bytes()
    dumped.write_bytes(content.replace(b'\\"format\\": 1', b'\\"format\\": 9'))
    with pytest.raises(DumpError, match="in format 1"):
        Dump.read(dumped)
    dumped.write_bytes(content.replace(b"mm_fp4_weight_only", b"mm_fp4_weight_onlx"))
    assert main(["replay", str(dumped)]) == 2
    assert "this version has no op mm_fp4_weight_onlx" in capsys.readouterr().err
    dumped.write_bytes(content)
    assert main(["replay", str(dumped), "--device", "nowhere"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: --device nowhere: ") and not shown.out
    assert dumped.read_bytes() == content  # a replay does not change the dump
