"""Check that invalid sizes and options of the examples end with one line that names the expected values."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quantize_and_save", ["--hidden", "128"], "--hidden: '128': expected a multiple of 256, 256 or more"),
        ("quantize_and_save", ["--layers", "0"], "--layers: '0': expected an integer, 1 or more"),
        ("quantize_and_save", ["--scheme", "fp8_block", "--activations", "16bit"], "fp8_block takes auto or fp8"),
        ("serve", ["--scheme", "fp8_block", "--activations", "fp4"], "fp8_block takes auto or fp8"),
        ("fp8_moe_layer", ["--hidden", "64"], "--hidden: '64': expected a multiple of 128, 128 or more"),
        ("moe_layer", ["--hidden", "100"], "--hidden: '100': expected a multiple of 64, 64 or more"),
        ("moe_layer", ["--top", "two"], "--top: 'two': expected an integer, 1 or more"),
        ("expert_models", ["--layers", "1"], "--layers: '1': expected an integer, 2 or more"),
        ("expert_models", ["--experts", "-8"], "--experts: '-8': expected a multiple of 8, 8 or more"),
    ],
)
def test_options_that_are_wrong(quickstart, capsys, name, options, message) -> None:
    if name in ("serve", "expert_models"):
        pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as error:
        importlib.import_module(name).parse(options)
    assert error.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(message)


def test_a_checkpoint_has_its_own_scheme(quickstart) -> None:
    """Check that a run with a checkpoint accepts options that a run with random weights refuses."""
    pytest.importorskip("transformers")
    options = importlib.import_module("serve").parse(
        ["--model", "folder", "--scheme", "fp8_block", "--activations", "fp4"]
    )
    assert (options.model, options.activations) == ("folder", "fp4")
