"""`kvstore bench --busy` at a tiny size: what it reports, and that a block that is not verified fails it. No figure's size
is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore import KVStore
from kvstore.tools import bench_busy
from kvstore.tools.bench_subject import BenchError, Geometry, as_bytes, make_layers, planes
from kvstore.tools.cli import app

SMALL = Geometry(blocks=3, layers=2, heads=2, tokens=4, head_size=16)
OPTIONS = ["--blocks", "3", "--layers", "2", "--heads", "2", "--tokens", "4", "--head-size", "16", "--repeat", "1"]
RATIOS = {"busy_get_vs_idle", "busy_loop_vs_alone", "process_get_vs_inline", "busy_get_vs_idle_inline"}
STORES = [pytest.param({"process": io, "inline": "inline"}, id=io) for io in ("process", "inline")]


def run(path: Path, stores: dict[str, str], tick: Callable[[str], None] = lambda what: None, repeat: int = 2) -> Any:
    return bench_busy.run(SMALL, "BHNC", repeat, path, tick, stores, seconds=0.01)


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["bench", "--busy", *arguments])


@pytest.mark.parametrize("stores", STORES)
def test_it_reports_every_figure_and_leaves_nothing(stores: dict[str, str], tmp_path: Path) -> None:
    ticks: list[str] = []
    report = json.loads(json.dumps(run(tmp_path, stores, ticks.append)))
    assert list(tmp_path.iterdir()) == []
    assert len(ticks) == bench_busy.num_steps(2)
    assert set(report["ratios"]) == set(report["ratio_spreads"]) == RATIOS
    steps = {step for steps in bench_busy.ROUNDS for step in steps}
    assert set(report["figures"]) | {"loop"} == steps == set(ticks)
    assert set(report["turns_per_s"]) == {step for step in steps if step == "loop" or step.endswith("_busy")}
    kinds = [kind for figures in report["figures"].values() for kind in figures.values()]
    for spread in [*report["ratio_spreads"].values(), *report["turns_per_s"].values(), *kinds]:
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
    assert {name: values["median"] for name, values in report["ratio_spreads"].items()} == report["ratios"]
    assert set(report["figures"]["process_put_busy"]) == {"ms", "gb_per_s"}
    assert set(report["figures"]["process_match_busy"]) == {"ms"}


def test_it_says_what_a_call_is_and_where_it_ran(tmp_path: Path) -> None:
    report = run(tmp_path, {"process": "inline", "inline": "inline"}, repeat=1)
    assert (report["blocks_per_call"], report["block_bytes"], report["bytes_per_call"]) == (3, 1024, 3072)
    assert report["machine"]["cpu_count"] >= 1
    assert report["machine"]["python_threads"] >= 2
    assert report["geometry"]["tokens"] == SMALL.tokens
    told = "\n".join(bench_busy.lines(report))
    for words in ("3 blocks", "CPUs", "Python threads", "switch interval", *RATIOS):
        assert words in told


def test_ratios_are_those_of_a_calculation_by_hand() -> None:
    found = bench_busy._ratios(
        {
            "loop": [bench_busy.Sample(1, 200), bench_busy.Sample(1, 100)],
            "process_get_busy": [bench_busy.Sample(4, 150), bench_busy.Sample(2, 90)],
            "process_get_idle": [bench_busy.Sample(2, 0), bench_busy.Sample(1, 0)],
            "inline_get_idle": [bench_busy.Sample(3, 0), bench_busy.Sample(2, 0)],
            "inline_get_busy": [bench_busy.Sample(30, 190)],
        }
    )
    assert found == {
        "busy_get_vs_idle": [0.5, 0.5],
        "process_get_vs_inline": [1.5, 2.0],
        "busy_get_vs_idle_inline": [0.1],
        "busy_loop_vs_alone": [0.75, 0.9],
    }


def damage(folder: Path) -> None:
    """Flip a byte of a stored cell."""
    cell = as_bytes(next(iter(planes(make_layers(SMALL, "BHNC", SMALL.seed)["model.layers.0.self_attn.attn"]))))[
        0, 0, 0
    ]
    (path,) = folder.rglob("data.mdb")
    found = path.read_bytes()
    assert bytes(cell) in found
    with path.open("r+b") as file:
        for at in [n for n in range(len(found)) if found.startswith(bytes(cell), n)]:
            file.seek(at)
            file.write(bytes([found[at] ^ 1]))


@pytest.mark.parametrize("stores", STORES)
@pytest.mark.parametrize("name", ["process", "inline"])
def test_a_block_that_is_not_verified_fails_it(name: str, stores: dict[str, str], tmp_path: Path) -> None:
    def tick(step: str) -> None:
        if step == f"{name}_get_busy":
            damage(next(tmp_path.iterdir()) / name)

    with pytest.raises(BenchError, match=r"1 blocks were not verified, block \d: storage_hash"):
        run(tmp_path, stores, tick)
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_are_not_matched_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStore, "match_prefix", lambda self, hashes: len(hashes) - 1)
    with pytest.raises(BenchError, match="2 of 3 leading blocks"):
        run(tmp_path, {"process": "inline", "inline": "inline"})


def test_the_loop_turns_while_calls_run_and_no_longer() -> None:
    with ThreadPoolExecutor(1) as pool:
        beside, calls = bench_busy.Beside(pool, 0.02), list[int]()
        sample = beside.measure(lambda: calls.append(1), busy=True)
        assert sample.turns > 0
        assert sample.seconds * len(calls) >= 0.02
        assert beside.measure(lambda: calls.append(1), busy=False).turns == 0
        assert beside.alone().turns > 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_busy.run, "__defaults__", (lambda what: None, bench_busy.STORES, 0.01))
    ran = invoke(*OPTIONS, "--json", "--path", str(tmp_path))
    assert ran.exit_code == 0, ran.output
    assert ran.stderr == ""
    report = json.loads(ran.stdout)
    assert set(report["ratios"]) == RATIOS
    assert report["stores"] == {"process": "process", "inline": "inline"}
    assert invoke(*OPTIONS, "--path", str(tmp_path)).stdout.startswith("3 blocks")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capacity-mib", "64"], "--capacity-mib with --busy"),
        (["--steady"], "--busy with --steady"),
        (["--device", "cuda"], "--busy with --device cuda"),
        (["--layouts", "XYZ"], "layout 'XYZ'"),
        (["--blocks", "1000000000000"], "fewer --blocks"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    ran = invoke("--path", str(tmp_path), *arguments)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert ran.stderr.count("\n") == 1
