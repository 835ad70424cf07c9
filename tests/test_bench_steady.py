"""`kvstore bench --steady` at a small size: what it reports, and that a put that finds no room fails it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.tools import bench_steady
from kvstore.tools.bench_subject import MIB, BenchError

ROOT = Path(__file__).parent.parent


def test_it_reports_ratios_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.tools.cli", "bench", "--steady", "--capacity-mib", "64", "--json"]
    run = subprocess.run(
        [*command, "--path", str(tmp_path)], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert set(report["ratios"]) == {"steady_oldest", "steady_random", "cold_get_vs_pread"}
    for victims, found in report["steady"].items():
        rates = found["gb_per_s"]
        assert report["ratios"][f"steady_{victims}"] == rates[-1] / rates[1]
        assert found["stored_share"] > 0.8
        assert found["evicted"] > 0
    assert report["cold"]["ratio"] > 0
    assert list(tmp_path.iterdir()) == []
    assert "last / second" in "\n".join(bench_steady.lines(report))


def test_every_step_is_announced(tmp_path: Path) -> None:
    steps: list[str] = []
    bench_steady.run(tmp_path, 64 * MIB, 1, steps.append)
    assert len(steps) == bench_steady.num_steps()


def test_a_put_that_finds_no_room_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.keeper.Keeper.named", lambda self, keys: [])
    with pytest.raises(BenchError, match="were not stored: store_full"):
        bench_steady.run(tmp_path, 64 * MIB, 1)


def test_options_of_the_other_benchmark_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.tools.cli", "bench", "--steady", "--layers", "3", "--path", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "--layers with --steady" in run.stderr
