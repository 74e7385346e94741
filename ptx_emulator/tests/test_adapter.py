"""Run a CuTe DSL GEMM kernel in the emulator. Check its results, and check that the emulator finds injected faults."""

import re
from typing import Any

import pytest
import torch
from gemm_kernel import Config, GemmKernel
from programs import SEEDS

from ptx_emulator import Race
from ptx_emulator.adapter import run_kernel
from torch_cute_ops.runtime.arch import ARCHS


def gemm(config: tuple, rows: int, seed: int | None, edit: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a GEMM with the small DSL kernel in the emulator, and with torch. Return both results."""
    config = Config(*config)
    dtype = {"Float16": torch.float16, "BFloat16": torch.bfloat16}[config.dtype]
    a, b = torch.randint(-16, 17, (rows, config.k)).to(dtype), torch.randint(-16, 17, (config.k, 32)).to(dtype)
    out = torch.full((rows, 32), torch.nan)
    given = b.T.contiguous() if config.transposed else b
    run_kernel(GemmKernel(config), ARCHS["sm_90a"], a, given, out, seed=seed, strict=True, edit=edit)
    return out, a.float() @ b.float()


GEMMS = [("Float16", 64, True), ("BFloat16", 64, False)]


@pytest.mark.parametrize("seed", [None, *SEEDS])
@pytest.mark.parametrize("config", GEMMS)
def test_matrix_product_of_the_dsl(config: tuple, seed: int | None) -> None:
    for rows in (16, 23, 32):
        assert torch.equal(*gemm(config, rows, seed))


@pytest.mark.parametrize("config", GEMMS)
def test_wrong_matrix_products_of_the_dsl(config: tuple) -> None:
    def without(pattern: str, which: int) -> Any:
        def edit(text: str) -> str:
            at = list(re.finditer(pattern, text))[which]
            return text[: at.start()] + text[at.end() :]

        return edit

    wait, barrier, group = r"cp\.async\.wait_group\s+1;", r"bar\.sync\s+0;", r"cp\.async\.commit_group;"
    # Remove one synchronisation at a time. Then either loads may precede the copy to their stage, or the next copy may
    # overwrite a stage before it is read.
    for pattern, which in ((wait, 1), (barrier, 0), (barrier, 1), (barrier, 2), (barrier, 3), (group, 1)):
        for seed in (None, 0, 1):
            with pytest.raises(Race, match=r"cp\.async"):
                gemm(config, 32, seed, without(pattern, which))
