"""Check many cases in one pytest item (a chunk), because an item costs pytest and pytest-xdist more time than most
cases take."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

Check = Callable[..., None]


@dataclass(frozen=True)
class Chunk:
    """Cases that one pytest item checks.

    Attributes:
        id: id of the item's parameter.
        cases: cases made by ``pytest.param``, each with an id.
    """

    id: str
    cases: tuple[Any, ...]

    def selected(self, pattern: str | None) -> tuple[Any, ...]:
        """Return the cases whose ids match the pattern given by ``--sample``, or all cases without a pattern."""
        return tuple(case for case in self.cases if pattern is None or fnmatch.fnmatchcase(case.id, pattern))


def each_case(names: tuple[str, ...], cases: Iterable[Any], chunk_of: Callable[..., str]) -> Callable[[Check], Check]:
    """Return a decorator like ``pytest.mark.parametrize`` that makes one pytest item per chunk of cases.

    Every case is checked, even if earlier cases fail. A case's random data depends only on the seed and the case's id.
    Fixtures are made once per chunk. If a fixture's value defines a method ``anew``, the method is called before each
    case to restore the value's state.

    Args:
        names: names of the check's parameters whose values a case provides.
        cases: cases made by ``pytest.param``, each with an id.
        chunk_of: function that returns the id of a case's chunk, given the case's values. Chunks with the same id run
            on the same worker.
    """
    chunks: dict[str, list[Any]] = {}
    for case in cases:
        chunks.setdefault(chunk_of(*case.values), []).append(case)
    parameters = [pytest.param(Chunk(each, tuple(held)), id=each) for each, held in chunks.items()]

    def decorate(check: Check) -> Check:
        @pytest.mark.parametrize("chunk", parameters)
        @functools.wraps(check)
        def test(
            request: pytest.FixtureRequest, seed_case: Callable[[str], None], chunk: Chunk, **fixtures: Any
        ) -> None:
            run_cases(request.config, seed_case, chunk, functools.partial(check, **fixtures), names, fixtures.values())

        own = [
            each
            for each in inspect.signature(test, follow_wrapped=False).parameters.values()
            if each.name != "fixtures"
        ]
        given = [each for each in inspect.signature(check).parameters.values() if each.name not in names]
        test.__signature__ = inspect.Signature([*own, *given])  # type: ignore[attr-defined]
        return test

    return decorate


def run_cases(
    config: pytest.Config,
    seed_case: Callable[[str], None],
    chunk: Chunk,
    check: Check,
    names: tuple[str, ...],
    fixtures: Iterable[Any],
) -> None:
    """Check each case of a chunk. Then raise one error that lists all failures, or skip if all cases were skipped."""
    restarts = [fixture.anew for fixture in fixtures if hasattr(fixture, "anew")]
    cases = chunk.selected(config.getoption("sample"))
    failures: dict[str, BaseException] = {}
    skips: list[pytest.skip.Exception] = []
    for case in cases:
        seed_case(case.id)
        for restart in restarts:
            restart()
        try:
            check(**dict(zip(names, case.values, strict=True)))
        except pytest.skip.Exception as skip:
            skips.append(skip)
        except (Exception, pytest.fail.Exception) as failure:
            failures[case.id] = failure
    if failures:
        first = next(iter(failures.values()))
        if len(cases) == 1:
            raise first
        lines = [f"{len(failures)} of {len(cases)} cases failed; one alone: --sample NAME, with the --seed below"]
        lines += [f"  {name}: {first_line(failure)}" for name, failure in failures.items()]
        raise AssertionError("\n".join(lines)) from first
    if len(skips) == len(cases):
        raise skips[0]


def first_line(failure: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    text = str(failure).strip().partition("\n")[0]
    return f"{type(failure).__name__}: {text}"
