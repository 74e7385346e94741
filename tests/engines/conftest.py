"""Tests that serve models with an engine. They are collected only where the engine is installed: ``make test-vllm``."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_vllm_*.py"]
