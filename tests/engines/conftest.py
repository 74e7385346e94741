"""Tests that serve models with an engine. They are collected only where the engine is installed: ``make test-vllm``."""

import importlib.util

collect_ignore_glob = [f"test_{engine}_*.py" for engine in ("vllm", "sglang") if not importlib.util.find_spec(engine)]
