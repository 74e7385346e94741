"""Benchmark of models that a serving engine runs: ``python -m benchmarks vllm``.

Reading order: `backends.py` (kernels that are compared), `checkpoints.py` (random and decoded checkpoints), `engine.py`
(program that measures one engine in its own process), `kernels.py` (kernels that a served model really calls),
`outputs.py` (formulas, and comparison of answers), `processes.py` (starts the programs), `results.py` (targets, table,
picture) and `command.py` (the command).
"""
