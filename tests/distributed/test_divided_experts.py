"""Experts divided among real processes: results, reads from a checkpoint, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import experts as support
from support.experts import Block, E, Experts, GptOssExperts, H
from support.layers import assert_same_layer
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from torch_cute_ops import checkpoint, nvfp4_global_scale
from torch_cute_ops.distributed import DividedExperts, count_traffic, decoder_plan, load_
from torch_cute_ops.nn import QuantExperts, quantize_
from torch_cute_ops.nn.experts import few_tokens

pytest.importorskip("safetensors")
from support import checkpoints
from support.checkpoints import note_reads

WORLD = 2
WIDTH = 256
WAYS = ("expert", "tensor")
FORMS = [
    *(("nvfp4", Experts), ("nvfp4", GptOssExperts), ("mxfp4", GptOssExperts)),
    *(("fp8_block", Experts), ("fp8_channel", Experts), ("mxfp8", Experts)),
]
M, TOPK = 5, 2


def block_of(form, scheme: str) -> Block:
    return quantize_(Block(form(width=WIDTH)).bfloat16(), scheme)


def ways_of(scheme: str) -> tuple[str, ...]:
    """Return the supported ways to divide experts in a format. Scales per token cannot be divided."""
    return ("expert",) if scheme == "fp8_channel" else WAYS


def divided(block: Block, mesh, by: str, sums: torch.dtype | None = None) -> QuantExperts:
    experts = copy.deepcopy(block.mlp.experts)
    return parallelize_module(experts, mesh, DividedExperts(by, sums=sums))


@torch.no_grad()
def values(rank: int) -> None:
    """Check results against undivided experts in float64, rounded where the ops round. Pairs without an expert add
    nothing."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for scheme, form in FORMS:
        torch.manual_seed(0)
        block = block_of(form, scheme)
        whole, x = block.mlp.experts, torch.randn(M, H).bfloat16()
        ids = torch.stack([torch.randperm(E)[:TOPK] for _ in range(M)])
        ids[1, 0], ids[2] = -1, -1
        factors = torch.rand(M, TOPK)
        biases = None
        if form is GptOssExperts:
            stacks = (whole.gate_up_proj.bias, whole.down_proj.bias)
            biases = tuple(each.detach().double().numpy().reshape(E, -1) for each in stacks)
        granularity = {"fp8_channel": "token", "mxfp8": "block32"}.get(scheme, "block128")
        weights = support.decoded(whole)
        want = support.computed(x, ids, factors, *weights, biases, whole.swiglu[:3], granularity=granularity)
        reference = copy.deepcopy(whole)
        if biases is not None:  # convert the biases to a dtype that the GEMM supports for this result dtype
            reference.down_proj.bias = nn.Parameter(whole.down_proj.bias.float(), requires_grad=False)
        for by in ways_of(scheme):
            for sums in (torch.float32, None):
                experts = divided(block, mesh, by, sums)
                assert isinstance(experts, QuantExperts) and f"DividedExperts(by='{by}'" in repr(experts)
                assert (experts.experts, experts.intermediate_size) == ((2, 256) if by == "expert" else (4, 128))
                with count_traffic() as traffic:
                    y = experts(x, ids, factors)
                assert traffic.nbytes("all_reduce") == M * H * (2 if sums is None else 4)
                assert y.dtype == x.dtype
                error = np.linalg.norm(y.double().numpy() - want) / np.linalg.norm(want)
                assert error < (0.07 if scheme == "nvfp4" else 0.015), (scheme, form, by, sums, error)
                assert not y[2].any()
                with pytest.raises(ValueError, match=f"top_k_index holds {E}, out of range: there are {E} experts"):
                    experts(x, torch.full_like(ids, E), factors)
                # The sum of all ranks' results equals the undivided result, except for the order of float32 additions
                # or one rounding per rank.
                exact = reference.summed(x, ids, factors, torch.float32)
                bound = 2.0**-8 * exact.abs() + 1e-4 if sums else 2.0**-6 * exact.abs().max()
                assert ((y.float() - exact).abs() <= bound).all(), (scheme, form, by, sums)

        if "fp8" not in scheme:
            whole.route_few_()
            exact = whole(x, ids, factors).float()
            for by in WAYS:
                few = divided(block, mesh, by)
                assert few.side_by_side.weight.numel() == whole.side_by_side.weight.numel() // WORLD
                y = few(x, ids, factors).float()
                assert ((y - exact).abs() <= 2.0**-6 * exact.abs().max()).all(), (scheme, form, by)
                line = few_tokens(few.intermediate_size) * E // TOPK
                assert few.is_few(line, TOPK) and not few.is_few(line + 2, TOPK)
                assert not few.is_few(513, 1)
            # FP4 activations, with a global scale per expert
            amax = torch.linspace(60, 90, E)
            hidden = torch.cat([nvfp4_global_scale(each) for each in amax])
            scales = {"input_global_scale": nvfp4_global_scale(x.abs().amax()), "hidden_global_scale": hidden}
            whole.route_few_("fp4", **(scales if scheme == "nvfp4" else {}))
            exact = whole(x, ids, factors).float()
            for by in WAYS:
                few = divided(block, mesh, by)
                assert few.side_by_side.activations == "fp4"
                y = few(x, ids, factors).float()
                assert ((y - exact).abs() <= 2.0**-6 * exact.abs().max()).all(), (scheme, form, by)
                with pytest.raises(RuntimeError, match="call the module"):
                    few.forward_dense(x, torch.ones(M, E))


def write_gpt_oss(folder: Path) -> None:
    tensors = {**checkpoints.gpt_oss_experts(E, H, WIDTH), "o_proj.weight": torch.randn(H, H).bfloat16()}
    checkpoints.write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["o_proj"]})


@torch.no_grad()
def from_a_checkpoint(rank: int, folder: Path) -> None:
    """Check that experts loaded into shards equal shards of the whole experts, and that each rank reads only its
    experts, or only its shard of each expert."""
    mesh = init_device_mesh("cpu", (WORLD,))
    read: list = []
    note_reads(read)
    styles = {"nvfp4": "modelopt", "mxfp4": "compressed-tensors", "fp8_block": "compressed-tensors"}
    styles |= {"fp8_channel": "compressed-tensors", "mxfp8": "compressed-tensors"}
    for case, form in (*FORMS, ("gpt-oss", GptOssExperts)):
        path = folder / f"{case}-{form.__name__}"
        if rank == 0:
            torch.manual_seed(1)
            if case == "gpt-oss":
                write_gpt_oss(path)
            else:
                checkpoint.save(block_of(form, case), path, styles[case])
        dist.barrier()
        with torch.device("meta"):
            blank = [Block(form(width=WIDTH)).bfloat16() for _ in range(3)]
        whole = checkpoint.load_(blank.pop(), path)
        for by in ways_of(case):
            expected = divided(whole, mesh, by)
            read.clear()
            loaded = load_(blank.pop(), path, mesh, {"mlp.experts": DividedExperts(by)})
            got = loaded.mlp.experts
            assert type(got) is type(expected) and got.first == expected.first == (2 * rank if by == "expert" else 0)
            assert (got.experts, got.swiglu, got.topk) == (expected.experts, whole.mlp.experts.swiglu, 2)
            for key in ("gate_up_proj", "down_proj"):
                assert_same_layer(getattr(got, key), getattr(expected, key))
            assert torch.equal(loaded.o_proj.weight, whole.o_proj.weight)
            names = {each if isinstance(each, str) else each[0] for each in read}
            if case == "gpt-oss":
                half = (0, 2 * rank, 2 * rank + 2) if by == "expert" else (2, 4 * rank, 4 * rank + 4)
                assert ("mlp.experts.down_proj_blocks", *half) in read
                assert "mlp.experts.down_proj_blocks" not in read
            elif by == "expert":
                # Names show local indices: each rank numbers its half of the experts from 0.
                assert {name.split(".")[2] for name in names if "experts" in name} == {"0", "1"}
            else:
                half = WIDTH // 2 // (2 if "fp4" in case else 1)
                weight = "weight_packed" if case == "mxfp4" else "weight"
                down, gate = (f"mlp.experts.3.{part}.{weight}" for part in ("down_proj", "gate_proj"))
                assert (down, 1, rank * half, rank * half + half) in read and down not in read
                assert (gate, 0, rank * WIDTH // 2, (rank + 1) * WIDTH // 2) in read and gate not in read


def everything(rank: int, folder: Path) -> None:
    values(rank)
    from_a_checkpoint(rank, folder)


def test_divided_experts(tmp_path):
    run_ranks(WORLD, everything, tmp_path)


# Errors, on a single rank


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def test_errors(mesh, tmp_path):
    six = quantize_(Block(Experts(experts=6)).bfloat16(), "mxfp4")
    with pytest.raises(ValueError, match="by is 'rows'; expected one of 'expert', 'tensor'"):
        DividedExperts("rows")
    with pytest.raises(TypeError, match="DividedExperts is for QuantExperts; got Experts"):
        parallelize_module(Experts(), mesh, DividedExperts())
    with pytest.raises(ValueError, match="has 6 experts, which 4 ranks cannot divide equally"):
        parallelize_module(six.mlp.experts, mesh, DividedExperts())
    narrow = quantize_(Block(Experts(width=128)).bfloat16(), "mxfp4").mlp.experts
    with pytest.raises(ValueError, match="for 4 ranks, experts are 256 and 32 wide; expected multiples of 64"):
        parallelize_module(narrow, mesh, DividedExperts("tensor"))
    with pytest.raises(ValueError, match="with sequence=True use ExpertParallel"):
        decoder_plan(64, experts="expert", sequence=True)
    assert repr(decoder_plan(64, experts="tensor")["model.layers.*.mlp.experts"]) == (
        "DividedExperts(by='tensor', sums=None)"
    )

    # Errors of loading
    experts = DividedExperts()
    block = quantize_(Block(Experts(experts=8)).bfloat16(), "mxfp4")
    checkpoint.save(block, tmp_path / "eight", "compressed-tensors")
    divided = parallelize_module(copy.deepcopy(block), mesh, {"mlp.experts": experts})
    with pytest.raises(
        ValueError, match=r"save: mlp\.experts is divided among ranks; save the model before you divide it"
    ):
        checkpoint.save(divided, tmp_path / "again", "compressed-tensors")

    def on_meta(count: int = 8, width: int = support.I) -> Block:
        with torch.device("meta"):
            return Block(Experts(experts=count, width=width)).bfloat16()

    def load(model: nn.Module, plan, folder: str = "eight") -> nn.Module:
        return load_(model, tmp_path / folder, mesh, plan)

    assert load(on_meta(), {"mlp.experts": experts}).mlp.experts.first == 2
    with pytest.raises(TypeError, match=r"o_proj is a Linear; expected experts in parameters gate_up_proj and down_p"):
        load(on_meta(), {"o_proj": experts})
    with pytest.raises(ValueError, match=r"mlp.experts has 6 experts, which 4 ranks cannot divide equally"):
        load(on_meta(6), {"mlp.experts": experts})
    with pytest.raises(ValueError, match=r"does not use mlp.experts.4.down_proj.* in .*, .* and .* more"):
        load(on_meta(4), {"mlp.experts": experts})
    with pytest.raises(ValueError, match=r"\(N, K\) is \(128, 256\); expected \(384, 256\)"):
        load(on_meta(8, 384), {"mlp.experts": experts})
    tensors = {"mlp.experts.gate_up_proj": torch.randn(8, 256, H), "mlp.experts.down_proj": torch.randn(8, H, 128)}
    checkpoints.write(tmp_path / "float", {**tensors, "o_proj.weight": torch.randn(H, H)}, {"quant_method": "mxfp4"})
    with pytest.raises(ValueError, match=r"does not quantise mlp\.experts; expected quantised experts"):
        load(on_meta(), {"mlp.experts": experts}, "float")


def test_scales_of_tokens_are_not_divided():
    """Check that experts whose activations have one scale per token cannot be divided by intermediate size, neither
    before nor after they are sharded."""
    experts = block_of(Experts, "fp8_channel").mlp.experts
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)
    for divide in (DividedExperts("tensor").divide, DividedExperts("tensor").bind_experts):
        with pytest.raises(ValueError, match=r"the activations of a token share one scale; expected by='expert'"):
            divide(experts, mesh)
    assert experts.experts == E and experts.intermediate_size == WIDTH
