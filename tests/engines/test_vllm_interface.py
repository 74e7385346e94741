"""Compare the signatures of vLLM's stubs in ``make test`` with the installed vLLM."""

from __future__ import annotations

import dataclasses

import pytest
from interface import check_signature, signatures
from support import vllm_stub


@pytest.mark.parametrize(
    ("name", "stub", "theirs"), [pytest.param(*each, id=each[0]) for each in signatures(vllm_stub)]
)
def test_signature(name, stub, theirs):
    check_signature(stub, theirs)


def test_settings_of_experts() -> None:
    """Check that vLLM's settings of experts contain the attributes that the integration reads."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

    known = {*dir(FusedMoEConfig), *(field.name for field in dataclasses.fields(FusedMoEConfig))}
    assert {field.name for field in dataclasses.fields(vllm_stub.FusedMoEConfig)} <= known
    assert "enable_eplb" in {field.name for field in dataclasses.fields(FusedMoEParallelConfig)}
