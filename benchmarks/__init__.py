"""Benchmarks of the ops on a GPU: ``python -m benchmarks <op>``.

Reading order: `case.py` (interface of an op's benchmark), `measure.py` (timing), `runner.py` (measures the cases of an
op), `targets.py` (targets of the results), `report.py` and `plot.py` (table, JSON, picture), `rows.py`,
`fp4_rows.py`, `fp8_rows.py` and `moe_rows.py` (base classes of row-wise ops), `gemms.py`, `fp4_gemms.py`,
`expert_gemms.py`, `gated_expert_gemms.py` and `fp8_gemms.py` (base classes of GEMMs), `peers.py` and `fp4_peers.py`
(other libraries), `host.py` (host cost of a call), `compare.py` (two folders of results) and `performance.py` (results
against targets). `ops/` contains a file per op, named after the op; new files are found automatically. `engines/`
measures models that a serving engine runs.
"""
