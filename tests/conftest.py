"""Fixtures of all tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import KVStore, PagedKVCache
from tests.support import CAMPAIGNS, IO, io_mode, make_cache, open_store

IO_MODES = ("inline", "process")
PROCESS_CASES = 2
"""So many cases of a test run with io="process", evenly spread, unless its mark says otherwise."""
ALONE = ("test_campaign_io.py",)
"""Files whose tests use all cores and have deadlines of less than a second: marked `alone`."""
COUNTED: Counter[str] = Counter()
"""Tests that are marked `both`, by what runs of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked `both` with each io, save what is marked `inline`."""
    if metafunc.definition.get_closest_marker("both"):
        only_inline = metafunc.definition.get_closest_marker("inline")
        metafunc.parametrize("io", IO_MODES[:1] if only_inline else IO_MODES, indirect=True, scope="module")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test's many cases, run some with io="process", whose every opening starts a process; count what runs."""
    for item in items:
        if item.path.name in ALONE:
            item.add_marker("alone")
    left_out = {id(item) for cases in _process_cases(items) for item in _left_out(cases)}
    if left_out:
        COUNTED["left out: further cases of tests that run with process"] = len(left_out)
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
        items[:] = [item for item in items if id(item) not in left_out]
    for item in items:
        only_inline = item.get_closest_marker("inline")
        if item.get_closest_marker("both"):
            COUNTED[f"inline only: {only_inline.args[0]}" if only_inline else _io_of(item)] += 1


def _io_of(item: pytest.Item) -> str:
    return str(item.callspec.params["io"])  # type: ignore[attr-defined]


def _process_cases(items: list[pytest.Item]) -> Iterator[list[pytest.Item]]:
    """Each test's cases that run with io="process"."""
    cases = [i for i in items if i.get_closest_marker("both") and _io_of(i) == "process"]
    found: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in cases:
        found.setdefault((item.path, item.cls, item.originalname), []).append(item)  # type: ignore[attr-defined]
    return iter(found.values())


def _left_out(cases: list[pytest.Item]) -> list[pytest.Item]:
    marker = cases[0].get_closest_marker("both")
    most = marker.kwargs.get("cases", PROCESS_CASES) if marker else len(cases)
    kept = {round(i * (len(cases) - 1) / max(1, most - 1)) for i in range(most)}
    return [] if len(cases) <= most else [item for i, item in enumerate(cases) if i not in kept]


@pytest.fixture(scope="module", autouse=True)
def io(request: pytest.FixtureRequest) -> Iterator[str]:
    """The io of every store that a test opens, and of those that its scripts open, unless they say otherwise. Fixtures
    that keep a store for a whole module ask for it, so that they are made once for each."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(request, "param"):
            patch.setenv(IO, request.param)
        yield io_mode()


@pytest.fixture
def cache() -> PagedKVCache:
    """A small cache: 2 layers, 2 heads, 8 blocks of 4 tokens, bf16."""
    return make_cache()


@pytest.fixture
def store(tmp_path: Path, cache: PagedKVCache) -> Iterator[KVStore]:
    """An open store over `cache`."""
    with open_store(tmp_path / "store", cache) as opened:
        yield opened


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist hands over what the summary is made of."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput |= {"campaigns": CAMPAIGNS, "counted": dict(COUNTED)}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker hands over. Each collects all tests, and runs some."""
    handed = getattr(node, "workeroutput", {})
    CAMPAIGNS.extend(handed.get("campaigns", []))
    COUNTED.update({name: n - COUNTED[name] for name, n in handed.get("counted", {}).items()})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the fault campaigns found, and what ran with which io."""
    if CAMPAIGNS:
        terminalreporter.section("fault campaigns")
        for line in CAMPAIGNS:
            terminalreporter.write_line(line)
    if len(COUNTED) > 1:
        terminalreporter.section("tests by io")
        for name, count in COUNTED.most_common():
            terminalreporter.write_line(f"{count:5} {name}")
