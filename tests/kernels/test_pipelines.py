"""The tables of pipelines in the docstrings of kernel packages, compared with the mbarriers that the PTX initialises.

The columns of a table are listed in ``HEADER``. The entries of ``full`` and ``empty`` (arrival counts) and of
``stages`` are Python expressions of attributes of the package's ``Config``; ``-`` means that the barrier does not
exist.
"""

import importlib
import itertools
import pkgutil
import re
from collections import Counter, defaultdict
from functools import cache
from typing import Any, NamedTuple

import pytest
from support import kernel_grid
from support.kernel_grid import KernelCase

from ptx_emulator.adapter import compile_ptx
from torch_cute_ops import kernels
from torch_cute_ops.runtime.arch import ARCHS

HEADER = "| pipeline | buffer | producer | consumer | full | empty | stages |"
MAX_CASES = 3
"""Maximum number of cases to compile per package, which is enough for every table."""
GEMM_CASES = (
    kernel_grid.wgmma_cases,
    kernel_grid.mma_cases,
    kernel_grid.experts_cases,
    kernel_grid.gated_experts_cases,
    kernel_grid.tcgen05_cases,
    kernel_grid.tcgen05_experts_cases,
    kernel_grid.tcgen05_gated_cases,
    kernel_grid.weight_tcgen05_cases,
    kernel_grid.fp8_gemm_cases,
    kernel_grid.fp8_token_gemm_cases,
    kernel_grid.fp8_tcgen05_cases,
    kernel_grid.mxfp8_tcgen05_cases,
    kernel_grid.fp8_fp4_tcgen05_cases,
    kernel_grid.fp8_fp4_gemm_cases,
    kernel_grid.fp8_fp4_token_gemm_cases,
)
"""Functions that return cases of GEMMs."""


class Row(NamedTuple):
    """A row of a table, which describes one pipeline."""

    name: str
    full: str
    empty: str
    stages: str

    def counts(self, config: Any) -> Counter[int]:
        """Return the number of mbarriers that this pipeline needs with ``config``, keyed by arrival count."""
        barriers: Counter[int] = Counter()
        stages = evaluated(self.stages, config)
        for count in (self.full, self.empty):
            if count != "-" and stages:
                barriers[evaluated(count, config)] += stages
        return barriers


def evaluated(expression: str, config: Any) -> int:
    """Evaluate an expression of attributes of a config."""
    names = compile(expression, "table", "eval").co_names
    return int(eval(expression, {"__builtins__": {}}, {name: getattr(config, name, None) for name in names}))


def rows_of(docstring: str) -> list[Row]:
    """Return the rows of the table in a docstring, or no rows if it contains no table."""
    lines = [line.strip() for line in docstring.splitlines()]
    if HEADER not in lines:
        return []
    rows = []
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        name, _, _, _, full, empty, stages = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append(Row(name, full, empty, stages))
    return rows


@cache
def tables() -> dict[str, list[Row]]:
    """Return the rows of the table in the docstring of each kernel package, keyed by package."""
    packages = [module.name for module in pkgutil.iter_modules(kernels.__path__) if module.ispkg]
    docs = {name: importlib.import_module(f"{kernels.__name__}.{name}").__doc__ for name in packages}
    return {name: rows for name, doc in docs.items() if (rows := rows_of(doc or ""))}


@cache
def cases_by_package() -> dict[str, list[KernelCase]]:
    """Return cases of the kernel grid (GEMMs and row kernels), keyed by the package of the kernel."""
    found = defaultdict(list)
    for case in itertools.chain(kernel_grid.covering_cases(), *(cases(every=False) for cases in GEMM_CASES)):
        package = importlib.import_module(".".join(type(case.kernel).__module__.split(".")[:3]))
        if isinstance(case.kernel.config, package.Config):  # a package may contain kernels with another config
            found[package.__name__.split(".")[2]].append(case)
    return found


def chosen_cases(package: str) -> list[KernelCase]:
    """Choose a few cases of a package that cover the different counts in each row of its table."""

    def values(case: KernelCase) -> set[tuple[Any, ...]]:
        config = case.kernel.config
        return {(row.name, *sorted(row.counts(config).items())) for row in tables()[package]}

    left = {case: values(case) for case in cases_by_package()[package]}
    chosen: list[KernelCase] = []
    seen: set[tuple[Any, ...]] = set()
    while len(chosen) < MAX_CASES:
        best = max(left, key=lambda case: len(left[case] - seen))
        if chosen and not left[best] - seen:
            break
        chosen.append(best)
        seen |= left[best]
    return chosen


def initialised(ptx: str) -> list[Counter[int]]:
    """Return, for each kernel in the PTX, the number of mbarriers that it initialises, keyed by arrival count.

    Leave out kernels without mbarriers.
    """
    kernels_found = []
    for body in ptx.split(".entry")[1:]:
        constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", body))
        counts = re.findall(r"mbarrier\.init\S*\s+\[[^\]]+\], ([%\w]+);", body)
        if counts:
            kernels_found.append(Counter(int(constants.get(count, count)) for count in counts))
    return kernels_found


def expected(rows: list[Row], config: Any) -> list[Counter[int]]:
    """Return the counts that a table promises for each kernel of ``config``. A config for few rows may add a second
    kernel."""
    configs = (config, getattr(config, "few_rows_config", None))
    return [sum((row.counts(each) for row in rows), Counter()) for each in configs if each is not None]


def by_size(counters: list[Counter[int]]) -> list[Counter[int]]:
    """Sort counters by their totals."""
    return sorted(counters, key=Counter.total)


def ptx_of(case: KernelCase) -> str:
    """Return the PTX of a case's kernels."""
    return compile_ptx(case.kernel, ARCHS[case.arch]).ptx


@pytest.mark.parametrize("package", sorted(tables()))
def test_tables_agree_with_the_ptx(package: str) -> None:
    """Check that the table lists exactly the mbarriers that the PTX initialises, with their arrival counts."""
    for case in chosen_cases(package):
        found = initialised(ptx_of(case))
        assert by_size(found) == by_size(expected(tables()[package], case.kernel.config)), case.id


def test_a_wrong_table_is_noticed() -> None:
    """Check that a wrong count, a wrong number of stages or a missing row in a table is noticed."""
    rows = tables()["fp4_wgmma"]
    case = chosen_cases("fp4_wgmma")[0]
    found = initialised(ptx_of(case))
    assert found
    first, *rest = rows
    wrong = (
        [first._replace(full="2"), *rest],
        [first._replace(empty="consumer_warps + 1"), *rest],
        [first._replace(stages="stages - 1"), *rest],
        rest,
    )
    for table in wrong:
        assert expected(table, case.kernel.config) != found


@pytest.mark.parametrize("package", sorted(set(cases_by_package()) - set(tables())))
def test_kernels_without_mbarriers_need_no_table(package: str) -> None:
    """Check that a package without a table initialises no mbarriers."""
    assert not initialised(ptx_of(cases_by_package()[package][0]))
