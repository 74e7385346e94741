"""Name of the argument for the KV cache, which transformers 5.24 calls ``cache`` and 5.17 ``past_key_values``."""

import inspect
from typing import Any

from transformers import LlamaForCausalLM

NAME = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def cached(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model."""
    return {NAME: cache}
