"""Benchmarks of the ops on a GPU: ``python -m benchmarks <op>``.

Reading order: `case.py` (what the benchmark file of an op defines), `measure.py` (how time is taken), `runner.py` (one
op from cases to rows), `targets.py` (what results are held against), `report.py` and `plot.py` (table, JSON, picture),
`rows.py`, `fp4_rows.py`, `fp8_rows.py` and `moe_rows.py` (what row-wise ops share), `gemms.py`, `fp4_gemms.py`,
`expert_gemms.py`, `gated_expert_gemms.py` and `fp8_gemms.py` (what GEMMs share), `peers.py` and `fp4_peers.py` (what we
compare with), `host.py` (host cost of a call), `compare.py` (two folders of results) and `performance.py` (results
against targets). One file per op is in `ops/`, under the op's own name, and is found by its presence.
"""
