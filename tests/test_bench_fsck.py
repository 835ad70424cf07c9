"""`kvstore bench --fsck` at a tiny size: what it reports, and that a check that did not read every record intact fails it. No
figure's size is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.tools import bench_fsck
from kvstore.tools.bench_subject import MIB, BenchError
from kvstore.tools.cli import app

NAMES = {"fsck_vs_cat_2_mib", "fsck_vs_cat_64_kib", "fsck_vs_cat_small"}


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["bench", "--fsck", *arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str], Path]:
    """A report, its steps, and the folder it was made in."""
    folder, steps = tmp_path_factory.mktemp("bench"), list[str]()
    return bench_fsck.run(2 * MIB, 1, folder, 1, steps.append, small_records=20), steps, folder


def test_it_reports_every_figure_and_leaves_nothing(measured: tuple[dict[str, Any], list[str], Path]) -> None:
    report = json.loads(json.dumps(measured[0]))
    assert list(measured[2].iterdir()) == []
    assert set(report["ratios"]) == set(report["ratio_spreads"]) == NAMES
    assert {name: values["median"] for name, values in report["ratio_spreads"].items()} == report["ratios"]
    rows = report["rows"] | {"small": report["small"]}
    assert {name: (row["records"], row["block_bytes"]) for name, row in rows.items()} == {
        "2_mib": (1, 2 * MIB),
        "64_kib": (32, MIB // 16),
        "small": (20, MIB // 256),
    }
    for name, row in rows.items():
        assert row["file_bytes"] > row["records"] * row["block_bytes"]
        assert set(row["seconds"]) == set(row["cpu_seconds"]) == {"cat", "fsck", "quick"}
        assert row["cpu_seconds"]["fsck"]["min"] > 0
        assert set(row["mb_per_s"]) == {"cat", "fsck"}
        for values in [
            *row["seconds"].values(),
            *row["mb_per_s"].values(),
            report["ratio_spreads"][f"fsck_vs_cat_{name}"],
        ]:
            assert 0 < values["min"] <= values["median"] <= values["max"]


def test_a_ratio_is_that_of_its_seconds(measured: tuple[dict[str, Any], list[str], Path]) -> None:
    row, ratio = measured[0]["rows"]["2_mib"], measured[0]["ratios"]["fsck_vs_cat_2_mib"]
    seconds, rates = row["seconds"], row["mb_per_s"]
    assert ratio == seconds["cat"]["median"] / seconds["fsck"]["median"]
    assert rates["fsck"]["median"] == row["file_bytes"] / seconds["fsck"]["median"] / 1e6


def test_steps_are_announced(measured: tuple[dict[str, Any], list[str], Path]) -> None:
    assert measured[1] == ["make", "warm", "cat", "fsck", "quick"] * 3
    assert len(measured[1]) == bench_fsck.num_steps(1)


def test_it_says_what_was_measured_and_where(measured: tuple[dict[str, Any], list[str], Path]) -> None:
    *rows, last = bench_fsck.lines(measured[0])
    for row, words in zip(rows, ("1 records of 2,048 KiB", "32 records of 64 KiB", "20 records of 4 KiB"), strict=True):
        assert row.startswith(words)
        assert "ratio" in row
    assert "2 jobs" in last
    assert "page cache" in last


def test_the_command(
    measured: tuple[dict[str, Any], list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(bench_fsck, "run", lambda *some: asked.append(some[:4]) or measured[0])
    ran = invoke("--json", "--store-mib", "16", "--repeat", "3", "--seed", "5", "--path", str(tmp_path))
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == json.loads(json.dumps(measured[0]))
    assert asked == [(16 * MIB, 3, tmp_path, 5)]
    assert invoke().stdout.startswith("1 records of 2,048 KiB")


def test_a_store_that_is_not_clean_fails_it(tmp_path: Path) -> None:
    data = bench_fsck.make_store(tmp_path / "store", bench_fsck.SMALL, 5, 1)
    bench_fsck.check_clean(tmp_path / "store", 5)
    with pytest.raises(BenchError, match="a new store of 6 records unsound"):
        bench_fsck.check_clean(tmp_path / "store", 6)
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size // 2)
    with pytest.raises(BenchError, match="unsound"):
        bench_fsck.check_clean(tmp_path / "store", 5)
    with pytest.raises(BenchError, match="ended with status 4"):
        bench_fsck.timed((*bench_fsck.FSCK, str(tmp_path / "store")))


def test_a_command_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(BenchError, match="status 3: out of luck"):
        bench_fsck.timed((sys.executable, "-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"))


def test_a_file_that_is_read_from_the_disk_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_fsck, "timed", lambda command: bench_fsck.Spent(1.0, 1.0, 40 * MIB))
    with pytest.raises(BenchError, match="cat read 42 MB from the disk"):
        bench_fsck.run(2 * MIB, 1, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store-mib", "1000000000"], "smaller --store-mib"),
        (["--layers", "3"], "--layers with --fsck"),
        (["--busy"], "--busy with --fsck"),
        (["--device", "cuda"], "--fsck with --device cuda"),
        (["--path", "missing"], "--path missing"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str) -> None:
    ran = invoke(*arguments)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
