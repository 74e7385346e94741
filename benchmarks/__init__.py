"""Benchmarks of the ops on a GPU: ``python -m benchmarks <op>``.

Reading order: `case.py` (what an op's benchmark file says), `measure.py` (how time is taken), `runner.py` (one op from
cases to rows), `report.py` and `plot.py` (table, JSON, picture), `peers.py` (what we compare with), `rows.py`,
`fp4_rows.py` and `fp8_rows.py` (what row-wise ops share), `products.py` and `fp4_peers.py` (what products share, and
their peers), `host.py` (host cost of a call). One file per op lies in `ops/`, under the op's own name, and is found by
its presence.
"""
