"""`kvstore bench` on a tiny geometry: what it prints and what it leaves behind. No figure's size is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore import hostpath
from kvstore.tools import bench
from kvstore.tools.bench_limits import Limits, file_system
from kvstore.tools.bench_subject import BenchError, Caches, Geometry, Subject
from kvstore.tools.cli import app

TINY = ["--blocks", "3", "--layers", "2", "--heads", "2", "--tokens", "4", "--head-size", "16", "--repeat", "2"]
SMALL = Geometry(blocks=3, layers=2, heads=2, tokens=4, head_size=16)
RATIOS = ("get_verified_vs_memcpy", "put_nosync_vs_memcpy", "put_sync_vs_pwrite_sync", "checksum_vs_sum")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, list(arguments))


def test_json_has_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    ran = invoke("bench", *TINY, "--json", "--path", str(tmp_path))
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    report = json.loads(ran.stdout)
    assert set(RATIOS) <= set(report["ratios"])
    assert all(value > 0 for value in (report["ratios"] | report["gb_per_s"]).values())
    assert set(report["gb_per_s"]) == set(bench.MEASURES)
    assert list(report["layouts"]) == ["BHNC", "2BNHD"]
    assert report["ratios"] == report["layouts"]["BHNC"]["ratios"]
    table = report["slice_table"]
    assert table["table_bytes"] == 8 * report["geometry"]["layers"] * report["geometry"]["heads"]
    assert table["bytes"] == table["table_bytes"] / report["geometry"]["block_bytes"]
    assert table["time"] < 1
    for found in report["layouts"].values():
        spreads = [*found["ratio_spreads"].values(), *found["gb_per_s"].values()]
        assert all(0 < s["min"] <= s["median"] <= s["max"] for s in spreads)
    assert report["geometry"]["block_bytes"] == 2 * 2 * 4 * 64
    assert report["repeat"] == 2
    assert {"numpy", "numba", "lmdb", "torch"} <= set(report["versions"])
    assert report["machine"]["cpu_count"] >= 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["BHNC", "2BNHD", "BHND"])
def test_each_kind_of_layout(layout: str, tmp_path: Path) -> None:
    report = bench.run(SMALL, [layout], 1, tmp_path)
    assert list(report["layouts"]) == [layout]


def test_ticks_as_often_as_announced(tmp_path: Path) -> None:
    ticks: list[str] = []
    bench.run(SMALL, ["BHNC"], 1, tmp_path, ticks.append)
    assert len(ticks) == bench.num_steps(["BHNC"], 1)
    assert set(ticks) == set(bench.MEASURES)


def test_table_fits_a_terminal(tmp_path: Path) -> None:
    ran = invoke("bench", *TINY, "--path", str(tmp_path))
    assert ran.exit_code == 0, ran.output
    for word in ("BHNC", "2BNHD", "get, verified", "put, no sync", "put, synced", "memcpy", "Medians of 2 rounds"):
        assert word in ran.stdout
    assert "…" not in ran.stdout
    assert not list(tmp_path.iterdir())


def test_folder_defaults_to_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bench.run(SMALL, ["BHNC"], 1, None, lambda what: seen.append(list(tmp_path.iterdir())))
    assert all(len(names) == 1 and names[0].name.startswith("kvstore-bench-") for names in seen)
    assert not list(tmp_path.iterdir())


def test_without_numba_the_report_says_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    hostpath.compiled_loops.cache_clear()
    try:
        report = bench.run(SMALL, ["BHNC"], 1, tmp_path)
    finally:
        hostpath.compiled_loops.cache_clear()
    assert report["layouts"]["BHNC"]["loops"] == "numpy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "XYZ"], "layout 'XYZ'"),
        (["--layouts", ","], "layout ''"),
        (["--layouts", "BNC"], "no axis for 2 heads"),
        (["--dtype", "int3"], "dtype 'int3'"),
        (["--head-size", "3"], "whole number of 8-byte pieces"),
        (["--path", "nowhere/at/all"], "expected a folder"),
        (["--blocks", "1000000000000"], "fewer --blocks"),
    ],
)
def test_errors_are_one_line_with_a_hint(arguments: list[str], message: str, tmp_path: Path) -> None:
    ran = invoke("bench", *TINY, "--path", str(tmp_path), *arguments)
    assert ran.exit_code == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert message in ran.stderr
    assert "bench --help" in ran.stderr
    assert not list(tmp_path.iterdir())


def test_help_and_version() -> None:
    assert "bench" in invoke("--help").stdout
    described = invoke("bench", "--help").stdout
    assert "--layouts" in described
    assert "kvstore bench --path" in described
    assert invoke("--version").stdout == f"kvstore {kvstore.__version__}\n"


def test_every_put_writes_and_every_get_is_of_the_last_put(tmp_path: Path) -> None:
    caches = Caches(SMALL, "BHNC")
    with Subject(tmp_path / "store", caches, "process") as subject:
        for _ in range(3):
            subject.put()
            subject.get()
        caches.check_equal()
        figures = subject._store.stats()
    assert figures["put_stored"] == figures["get_verified"] == 3 * SMALL.blocks
    assert figures["put_present"] == 0


def test_a_get_that_finds_nothing_is_an_error(tmp_path: Path) -> None:
    with Subject(tmp_path / "store", Caches(SMALL, "BHNC"), "process") as subject, pytest.raises(BenchError):
        subject.get()


def test_blocks_that_differ_are_an_error() -> None:
    with pytest.raises(BenchError, match="report this"):
        Caches(SMALL, "2BNHD").check_equal()


def test_limits_move_every_byte(tmp_path: Path) -> None:
    with Limits(tmp_path / "file", 1000, 300) as limits:
        limits.pwrite_sync()
        assert (tmp_path / "file").read_bytes() == b"\1" * 1000
        limits.pread()
        assert bytes(limits._two) == b"\1" * 1000
    assert not (tmp_path / "file").exists()


def test_file_system_of_proc() -> None:
    assert file_system(Path("/proc")) == "proc"
