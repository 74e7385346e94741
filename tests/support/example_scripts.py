"""Helpers for tests of the examples: run a script, read its output, and compute the numbers that it should print."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def printed(out: str) -> dict[str, str]:
    """Return the lines that the script printed, keyed by their first word."""
    return dict(line.split(maxsplit=1) for line in out.strip().splitlines())


def run_main(script: ModuleType, capsys: pytest.CaptureFixture, *arguments: str, status: int = 0) -> tuple[str, str]:
    """Run the script, check its exit status, and return its output and the output's last line."""
    assert script.main([*arguments]) == status
    out = capsys.readouterr().out
    return out, out.strip().splitlines()[-1]


def rows_of_layers(
    script: ModuleType, capsys: pytest.CaptureFixture, columns: str, *arguments: str
) -> tuple[str, list[tuple[str, ...]]]:
    """Run the script of an expert layer with 1 and 6 tokens. Return its output, and for each printed row the values
    that the regular expression ``columns`` finds after the number of tokens."""
    out, last = run_main(script, capsys, "--tokens", "1", "6", "--hidden", "128", *arguments)
    assert last == "SUCCESS: every check passed"
    count, *rows = zip(*re.findall(rf"^ +(\d+) +{columns}", out, re.MULTILINE), strict=True)
    assert count == ("1", "6")
    return out, list(zip(*rows, strict=True))


def nearest(value: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return, for each value, the nearest of the ascending ``numbers``. In a tie, either number may be returned."""
    return numbers[np.searchsorted((numbers[1:] + numbers[:-1]) / 2, value)]


def rounded(numbers: np.ndarray, fmt: str = "nvfp4") -> np.ndarray:
    """Return ``numbers`` (M, H) rounded to the format. For NVFP4, the global scale follows from their amax."""
    blocks = numbers.reshape(len(numbers), -1, 16 if fmt == "nvfp4" else 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    if fmt == "nvfp4":
        e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
        g = 2688 / np.abs(numbers).max()
        scale = nearest(amax * g / 6, e4m3) / g
    else:
        scale = 2.0 ** np.ceil(np.log2(amax / 6))
    e2m1 = np.array([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return (nearest(blocks / scale, e2m1) * scale).reshape(numbers.shape)


def mixed(
    token: torch.Tensor,
    scores: torch.Tensor,
    chosen: Iterable[int],
    weights_of: Callable[[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return the weighted sum of the ``chosen`` experts' results for one token. The weights are proportional to the
    experts' scores. ``weights_of(e)`` returns gate, up and down of expert e."""
    total = sum(scores[e] for e in chosen)
    parts = []
    for e in chosen:
        of_gate, of_up, of_down = weights_of(e)
        gate, up = of_gate @ token, of_up @ token
        parts.append(scores[e] / total * (of_down @ (gate / (1 + (-gate).exp()) * up)))
    return sum(parts)
