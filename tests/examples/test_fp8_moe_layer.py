"""Tests of examples/fp8_moe_layer.py."""

import importlib
from types import ModuleType

import pytest
import torch
from support.example_scripts import mixed, rows_of_layers, run_main


@pytest.fixture
def fp8_moe_layer(quickstart: ModuleType) -> ModuleType:
    return importlib.import_module("fp8_moe_layer")


def token_by_token(
    weights: tuple[torch.Tensor, ...], x: torch.Tensor, groups: int, best: int, top: int
) -> torch.Tensor:
    """Compute the layer in float64, one token and one expert at a time."""
    router, bias, both, down = (weight.double() for weight in weights)
    size = len(router) // groups
    results = []
    for token in x.double():
        scores = 1 / (1 + (-(router @ token)).exp())
        choice = scores + bias
        two_best = [sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[:2]) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -two_best[g])[:best]
        chosen = sorted((e for e in range(len(router)) if e // size in kept), key=lambda e: -choice[e])[:top]
        results.append(2.5 * mixed(token, scores, chosen, lambda e: (*both[e].chunk(2), down[e])))
    return torch.stack(results)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_fp8_moe_layer(fp8_moe_layer: ModuleType, capsys: pytest.CaptureFixture, layout: str) -> None:
    sizes = ["--experts", "16", "--intermediate", "128"]
    # On a GPU, the table contains two more columns with times.
    columns = r"(0\.\d{5}) +(0\.\d{4})(?: +[\d.]+ +[\d.]+)?$"
    out, rows = rows_of_layers(fp8_moe_layer, capsys, columns, "--layout", layout, *sizes)
    elements, blocks = 3 * 16 * 128 * 128, 3 * 16
    assert f"{2 * elements:,} bytes in bf16, {elements + 4 * blocks:,} as codes and scales: 2.00 times fewer" in out
    for cosine, error in rows:
        assert 0.99 < float(cosine) < 1 and 0.01 < float(error) < 0.1


@pytest.mark.parametrize(("weights", "bits", "layout"), [("mxfp4", 4.25, "contiguous"), ("nvfp4", 4.5, "masked")])
def test_fp4_weights(
    fp8_moe_layer: ModuleType, capsys: pytest.CaptureFixture, weights: str, bits: float, layout: str
) -> None:
    """Compare the layer with FP4 weights with a layer that multiplies the decoded weights."""
    sizes = ["--experts", "16", "--intermediate", "128"]
    columns = r"(0\.\d{5}) +(0\.\d{4})(?: +[\d.]+ +[\d.]+)?$"
    out, rows = rows_of_layers(fp8_moe_layer, capsys, columns, "--layout", layout, "--weights", weights, *sizes)
    elements = 3 * 16 * 128 * 128
    assert f"{2 * elements:,} bytes in bf16, {int(elements * bits / 8):,} as codes and scales" in out
    for cosine, error in rows:
        assert 0.997 < float(cosine) < 1 and 0.01 < float(error) < 0.08


@pytest.mark.parametrize(("layout", "has_counts"), [("contiguous", False), ("masked", True)])
def test_gemms_of_packed_rows_know_nothing_but_offsets(
    fp8_moe_layer: ModuleType,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    has_counts: bool,
) -> None:
    """Check that GEMMs over packed rows get offsets but no counts, because without counts a GEMM chooses tiles for
    random routing. In the masked layout, GEMMs get counts."""
    given = []

    def multiplied(*args: object, **named: object) -> torch.Tensor:
        given.append(args[5] if len(args) > 5 else named.get("counts"))
        return multiply(*args, **named)

    multiply = fp8_moe_layer.torch_cute_ops.grouped_mm_fp8
    monkeypatch.setattr(fp8_moe_layer.torch_cute_ops, "grouped_mm_fp8", multiplied)
    sizes = "--experts", "16", "--intermediate", "128"
    rows_of_layers(fp8_moe_layer, capsys, r"(0\.\d{5}) ", "--layout", layout, *sizes)
    assert given and {counts is not None for counts in given} == {has_counts}


def test_fewer_experts_than_a_token_has_by_default(fp8_moe_layer: ModuleType, capsys: pytest.CaptureFixture) -> None:
    sizes = ("--experts", "4", "--hidden", "128", "--intermediate", "128", "--tokens", "3")
    out, last = run_main(fp8_moe_layer, capsys, *sizes)
    assert last == "SUCCESS: every check passed" and "4 experts of 128, 4 a token" in out


@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2)])
def test_both_layers_are_what_they_say(fp8_moe_layer: ModuleType, groups: int, best: int) -> None:
    """Compare both layers with float64 computations: the bf16 layer on its weights, and the FP8 layer on its decoded
    weights."""
    weights = fp8_moe_layer.random_weights(256, 12, 128, torch.device("cpu"))
    routing = fp8_moe_layer.Routing(groups, best, 3)
    x = torch.randn(5, 256).bfloat16()
    want = token_by_token(weights, x, groups, best, 3)
    _, error = fp8_moe_layer.compared(fp8_moe_layer.BF16Layer(weights, routing)(x), want)
    assert error < 0.02
    decoded = []
    for weight in weights[2:]:
        codes, scale = fp8_moe_layer.in_fp8(weight)
        assert codes.float().abs().unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).amax((2, 4)).eq(448).all()
        decoded.append(codes.double() * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2))
    for weight, number in zip(weights[2:], decoded, strict=True):
        # An e4m3 code has three bits after the leading bit, so that rounding changes a value by at most 1/16. The
        # smallest codes are equally spaced, so that their error is absolute.
        assert ((weight.double() - number).abs() <= weight.double().abs() / 16 + weight.abs().max() / 448 / 512).all()
    experts = map(fp8_moe_layer.FP8Experts, weights[2:])
    layer = fp8_moe_layer.FP8Layer(*weights[:2], *experts, routing, False)
    in_fp8 = token_by_token((*weights[:2], *decoded), x, groups, best, 3)
    (_, error), (_, others) = (fp8_moe_layer.compared(layer(x), of) for of in (in_fp8, want))
    assert error < 0.06 and error < others


@pytest.mark.parametrize(("name", "place"), [("moe_permute_fp8quant", 0), ("grouped_mm_fp8", 1), ("moe_finalize", 1)])
def test_a_wrong_step_fails(
    fp8_moe_layer: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, place: int
) -> None:
    """Check that the script fails if a step gets the rows or weight of another expert."""
    right = getattr(fp8_moe_layer.torch_cute_ops, name)

    def of_another(rows: torch.Tensor) -> torch.Tensor:
        # Roll bytes, because torch cannot roll FP8 on a GPU; a rolled tensor is contiguous.
        codes = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
        rolled = codes.mT.roll(1, dims=0).mT if codes.dim() == 3 else codes.roll(1, dims=0)
        return rolled.view(rows.dtype)

    def wrong(*args, **kwargs) -> object:
        args = [of_another(arg) if i == place else arg for i, arg in enumerate(args)]
        return right(*args, **kwargs)

    monkeypatch.setattr(fp8_moe_layer.torch_cute_ops, name, wrong)
    sizes = ["--tokens", "6", "--hidden", "128", "--experts", "16", "--intermediate", "128"]
    _, last = run_main(fp8_moe_layer, capsys, *sizes, status=1)
    assert last.startswith("FAILURE: 6 tokens: a cosine of ")
