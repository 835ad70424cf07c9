"""The GPU benchmark without a GPU: its arithmetic, its order of things, and a rehearsal of all of it in Triton's
interpreter, from a copy of the tree that is not installed and with nothing but torch, triton and numpy."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvstore.cache import PagedKVCache
from kvstore.devicepath import DeviceRoute
from kvstore.tools import bench_gpu, gpu_host_cost, gpu_kernels, gpu_report, gpu_run, gpu_transfers
from kvstore.tools.cli import app
from kvstore.tools.gpu_cases import FORMS, Form, measured_forms, reference, scattered
from kvstore.tools.gpu_device import BenchError, Cuda, HostDevice, Mismatch, Rehearsal
from kvstore.tools.gpu_memory import ALIGNMENT, MIB, Geometry, Memory, rows_of, spans, window
from kvstore.tools.gpu_report import TARGETS, Report, grid, table
from kvstore.tools.gpu_run import GEOMETRIES, RESERVE, Plan, Run
from kvstore.tools.gpu_torch import TorchSums

ROOT = Path(__file__).parent.parent
BLOCKED = ("lmdb", "xxhash", "typer", "rich", "zstandard", "numba", "transformers")
NOTHING = replace(Plan().rehearsal(), forms={})
"""A plan that proves nothing, so that Triton is not needed."""
TINY = NOTHING.geometries


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_a_calculation_by_hand() -> None:
    seconds = {
        "copy": [0.004, 0.002, 0.003],
        "reduce": [0.002],
        "host_to_device": [0.02],
        "checksum": [0.0016],
        "gather": [0.004],
        "verify": [0.0005],
        "load": [0.025],
        "torch": [0.016],
    }
    found = gpu_kernels.figures(seconds, 6 * 10**9)
    by = found["operations"]
    assert by["copy"]["seconds"] == {"min": 0.002, "median": 0.003, "max": 0.004}
    assert by["copy"]["gb_per_s"] == pytest.approx(2000)
    assert by["copy"]["memory_gb_per_s"] == pytest.approx(4000)  # 6 GB read and 6 GB written in 3 ms
    assert by["reduce"]["memory_gb_per_s"] == pytest.approx(3000)  # 6 GB read in 2 ms
    assert by["checksum"]["of_copy"] == pytest.approx(3750 / 4000)
    assert by["checksum"]["of_reduction"] == pytest.approx(3750 / 3000)
    assert by["gather"]["of_copy"] == pytest.approx(3000 / 4000)
    assert by["host_to_device"] == {"seconds": dict.fromkeys(("min", "median", "max"), 0.02), "gb_per_s": 300}
    assert found["times_torch"] == pytest.approx(10)
    assert found["verify_of_load"] == pytest.approx(0.02)
    assert found["bytes"] == 6 * 10**9


def size(nbytes: int, share: float, times: float, verify: float) -> dict[str, Any]:
    by = {"checksum": {"of_copy": share}, "verify": {"of_copy": share - 0.01}}
    return {"bytes": nbytes, "operations": by, "times_torch": times, "verify_of_load": verify}


def test_targets_are_judged_by_the_worst_figure_that_counts() -> None:
    sizes = {"8": size(8 * MIB, 0.3, 6, 0.5), "256": size(253 * MIB, 0.9, 9, 0.01), "1024": size(2**30, 0.86, 8, 0.03)}
    report = {"kernels": {"BHNC": sizes}, "host_cost": {"of_allowed": 0.4}}
    judged = [(t.judge(report)["found"], t.judge(report)["met"]) for t in TARGETS]
    assert judged == [(0.86, True), (0.85, True), (6, True), (0.03, False), (0.4, True)]
    assert [t.judge({})["met"] for t in TARGETS] == [None] * 5


def test_host_cost_lines_and_the_worst_share() -> None:
    found = {"put": {"1": 101.0, "8": 108.0, "64": 164.0}, "verify": {"1": 402.0, "8": 20.0, "64": 20.0}}
    described = gpu_host_cost.describe(found)
    assert described["fit"]["put"] == pytest.approx({"batch": 100, "block": 1})
    assert described["of_allowed"] == 402 / 201
    assert gpu_host_cost.allowed(8) == 208


def test_rates_are_of_medians() -> None:
    found = gpu_transfers.rates({"put": [4.0, 1.0, 2.0]}, 10**9)
    assert found == {"bytes": 10**9, "put": {"seconds": 2.0, "gb_per_s": 0.5}}


def test_geometries_have_the_bytes_that_they_say() -> None:
    assert [g.block_bytes for g in GEOMETRIES] == [2 * MIB, 2 * MIB, 61 * 64 * 1152]
    assert GEOMETRIES[1].shape(5) == [2, 5, 16, 8, 128]
    plan = Plan()
    for g in GEOMETRIES:
        assert g.blocks_in(plan.cache_bytes) * g.block_bytes >= 2 * max(plan.call_bytes)
        assert max(plan.call_bytes) // g.block_bytes * g.block_bytes <= plan.staging_bytes
        assert 256 * MIB // g.block_bytes * g.block_bytes >= gpu_report.LARGE_BYTES
        assert g.block_bytes % 16 == 0
    assert set(measured_forms(GEOMETRIES)) | set(FORMS) == set(plan.forms)


# --- what a call works on --------------------------------------------------------------------------------------------


def test_calls_take_other_blocks_until_the_cache_is_used_up() -> None:
    cache = PagedKVCache.from_tensors({"layers.0": torch.zeros(10, 1, 2, 8)}, "BHNC")
    chosen = [span.block_ids.tolist() for span in spans(cache.group(0), 3, 4)]
    assert len(set(itertools.chain(*chosen[:3]))) == 9
    assert all(len(set(ids)) == 3 for ids in chosen)
    assert chosen[0] != sorted(chosen[0]) or chosen[1] != sorted(chosen[1])
    here, there = rows_of(spans(cache.group(0), 3, 4), Rehearsal())
    assert here.shape == there.shape == (4, 3, 5)
    assert here[1, :, 0].tolist() == chosen[1]


def test_windows_follow_each_other_and_stay_inside() -> None:
    memory = torch.arange(10)
    assert [window(memory, 4, n).tolist() for n in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("geometry", TINY, ids=lambda g: g.name)
def test_a_paged_cache_lies_in_the_memory_and_fills_it(geometry: Geometry) -> None:
    memory = Memory(Rehearsal(), 64 * 1024, 8192)
    cache = memory.paged(geometry)
    group = cache.group(0)
    assert group.block_bytes == geometry.block_bytes
    first, end = memory.cache.data_ptr(), memory.cache.data_ptr() + 64 * 1024
    tensors = list(cache.tensors.values())
    assert all(first <= t.data_ptr() and t.data_ptr() + t.nbytes <= end for t in tensors)
    assert (group.num_blocks + 1) * group.block_bytes + geometry.layers * ALIGNMENT > 64 * 1024
    assert memory.host.unique().numel() > 50


def test_too_little_memory_is_said_before_anything_begins() -> None:
    with pytest.raises(BenchError, match=r"GiB of the device are needed, .* are free"):
        Memory(Rehearsal(), 2**60, 0)


@pytest.mark.parametrize("layout", ["BHNC", "BNHC", "2BNHD", "B2NHD", "2BHND", "NBHC", "BNC"])
def test_the_torch_formulation_is_the_checksum(layout: str) -> None:
    geometry = Geometry("", layout, layers=3, heads=2 if "H" in layout else 1, tokens=4, channels=8)
    cache = Memory(Rehearsal(), 16 * 1024, 64).paged(geometry)
    group, sums = cache.group(0), TorchSums(cache, torch.device("cpu"))
    span = spans(group, 3, 2)[1]
    found = sums.sums(sums.ids(span), sums.weights(span)).numpy().view(np.uint64)
    assert np.array_equal(found, reference(group, span).sums)


def test_a_scattered_span_ends_with_a_partial_block_and_reaches_far_positions() -> None:
    cache = PagedKVCache.from_tensors({"layers.0": torch.zeros(5, 1, 4, 8)}, "BHNC")
    span = scattered(cache.group(0), 2**60)
    assert span.valid.tolist() == [4, 4, 4, 2]
    assert span.first_tokens[0] == 2**60
    assert len(set(span.block_ids.tolist())) == 4


# --- the clock -------------------------------------------------------------------------------------------------------


def test_timed_calls_are_numbered_after_a_first_one_that_does_not_count() -> None:
    calls: list[int] = []
    seconds = gpu_kernels.timed(Rehearsal(), calls.append, 3)
    assert calls == [3, 0, 1, 2]
    assert len(seconds) == 3


class FakeEvent:
    """Records at the fake device's time."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        assert self.at == FakeEvent.now

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at - self.at)


def test_a_cuda_device_is_held_then_timed_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def spend(seconds: float) -> None:
        FakeEvent.now += seconds

    properties = SimpleNamespace(name="GPU", total_memory=10, multi_processor_count=3)
    fakes = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "set_device": lambda device: spend(0),
        "Event": FakeEvent,
        "_sleep": lambda cycles: spend(7),
        "synchronize": lambda device: spend(0),
        "mem_get_info": lambda device: (5, 10),
        "get_device_properties": lambda device: properties,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("kvstore.tools.gpu_device.device_of", lambda device: HostDevice())
    place = Cuda("cuda")
    assert place.device == torch.device("cuda:1")
    assert place.seconds([lambda: spend(0.25), lambda: spend(0.5)]) == pytest.approx([0.25, 0.5])
    place.synchronize()
    assert place.free_bytes() == 5
    assert place.describe()["name"] == "GPU"
    cache = PagedKVCache.from_tensors({"layers.0": torch.zeros(2, 1, 2, 8)}, "BHNC")
    with pytest.raises(BenchError, match="no kernel serves"):
        place.route(cache)


def test_without_a_device_it_says_what_runs_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_gpu.main([]) == bench_gpu.UNABLE
    seen = capsys.readouterr()
    assert seen.out == ""
    assert "--host-cost" in seen.err


# --- moves and costs, with launches and copies stubbed out -----------------------------------------------------------


def stubbed_moves() -> gpu_transfers.Moves:
    """Of a device on which nothing that is started ever happens."""
    cache = gpu_host_cost.cache(6, torch.device("cpu"), layers=1)
    return gpu_transfers.Moves(cache, DeviceRoute(cache.group(0), HostDevice()), 4 * 128, 2 * 128)


def test_copies_that_never_happen_are_mismatches() -> None:
    with gpu_host_cost.stubbed():
        moves = stubbed_moves()
        with pytest.raises(Mismatch, match="gathered"):
            moves.put()
        with pytest.raises(Mismatch, match="scattered"):
            moves.check_get()
    assert not {"copy_", "zero_"} & set(vars(torch.Tensor))
    assert torch.zeros(2).copy_(torch.ones(2)).tolist() == [1, 1]


def test_what_a_store_needs_and_has_not_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu_host_cost.stubbed():
        moves = stubbed_moves()
    monkeypatch.setitem(sys.modules, "kvstore.store", None)
    with pytest.raises(gpu_transfers.LeftOut, match=r"kvstore\.store"):
        gpu_transfers.with_disk(moves, 1, 4096, tmp_path)
    monkeypatch.undo()
    with pytest.raises(gpu_transfers.LeftOut, match="expected a folder"):
        gpu_transfers.with_disk(moves, 1, 4096, tmp_path / "absent")


def test_host_cost_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(["--host-cost", "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    by = found["host_cost"]["microseconds"]
    assert all(set(by[step]) == {"1", "8", "64", "512", "4096"} for step in ("gather", "put", "get", "verify"))
    assert all(us > 0 for sizes in by.values() for us in sizes.values())
    assert "stubbed out" in capsys.readouterr().out
    assert bench_gpu.main(["--host-cost", "--json", "-"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"host_cost", "targets"}
    assert os.listdir(tmp_path) == ["out.json"]


def test_where_the_figures_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench_gpu._options([]).json == "bench_gpu.json"
    assert [bench_gpu._options([option]).json for option in ("--host-cost", "--rehearse")] == [None, None]
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main(["--json", "absent/out.json"])
    assert ended.value.code == bench_gpu.UNABLE


# --- the order of things ---------------------------------------------------------------------------------------------


def run(plan: Plan, report: Report, monkeypatch: pytest.MonkeyPatch, **phases: Any) -> bool:
    """A run whose phases, those that are given, are replaced."""
    for name, work in phases.items():
        monkeypatch.setattr(Run, f"_{name}", work)
    return Run(plan, Rehearsal(), report, None, lambda line: None).run()


def test_each_phase_is_written_down_and_a_failure_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "out.json", list[list[str]]()

    def end_to_end(self: Run) -> None:
        seen.append(list(json.loads(path.read_text())["seconds"]))

    def broken(*arguments: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(gpu_kernels, "measure", broken)
    report = Report(path)
    assert not run(NOTHING, report, monkeypatch, end_to_end=end_to_end, costs=lambda self: None)
    assert seen == [["correctness", "kernels"]]
    found = json.loads(path.read_text())
    assert set(found["errors"]) == {"kernels"}
    assert found["errors"]["kernels"].endswith("out of order")
    assert not found["complete"]
    assert list(found["seconds"]) == ["correctness", "kernels", "end_to_end", "costs", "all"]
    assert "out of order" in table(found)


def test_what_is_too_late_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(NOTHING, limit_s=0)
    monkeypatch.setattr(gpu_run, "stubbed_cost", lambda batches: {})
    report = Report(None)
    assert not run(plan, report, monkeypatch)
    left = report.found["left_out"]
    assert [line.split(",")[0] for line in left] == [
        *(f"kernels: {g.name}" for g in plan.geometries for _ in plan.call_bytes),
        "end_to_end: all of it",
        "costs: on the device",
    ]
    assert list(RESERVE) == ["kernels", "end_to_end", "costs"]


def test_a_mismatch_ends_the_run_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(self: Run) -> None:
        raise Mismatch("gather")

    report = Report(None)
    with pytest.raises(Mismatch):
        run(NOTHING, report, monkeypatch, prove=prove)
    assert list(report.found["seconds"]) == ["correctness"]
    assert report.found["errors"] == {"correctness": "mismatch: gather"}


def test_a_proof_that_fails_otherwise_ends_the_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(self: Run) -> None:
        raise RuntimeError("no C compiler")

    report = Report(None)
    with pytest.raises(BenchError, match="no C compiler"):
        run(NOTHING, report, monkeypatch, prove=prove)
    assert list(report.found["seconds"]) == ["correctness"]


def test_what_breaks_unforeseen_has_not_the_status_of_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: unknown")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert bench_gpu.main([]) == bench_gpu.UNABLE
    assert "CUDA error: unknown" in capsys.readouterr().err


def test_quick_leaves_out_sizes_and_no_form() -> None:
    whole, quick = Plan(), Plan().quick()
    assert quick.forms == whole.forms
    assert set(quick.call_bytes) < set(whole.call_bytes)


def test_grid_of_short_rows() -> None:
    rows = [["name", "a", "b"], ["x", "1.00", "2"], ["words", "left out: everything"]]
    assert grid(rows).splitlines() == ["name      a  b", "x      1.00  2", "words  left out: everything"]


# --- the command -----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, ["bench", *arguments])


def test_the_command_hands_over_and_gives_the_status_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        seen.append(arguments)
        return 3

    monkeypatch.setattr(bench_gpu, "main", main)
    assert invoke("--device", "cuda:1", "--json", "--path", "/there").exit_code == 3
    assert invoke("--device", "cuda").exit_code == 3
    assert seen == [["--device", "cuda:1", "--path", "/there", "--json", "-"], ["--device", "cuda"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda", "--blocks", "128"], "--blocks with --device cuda"),
        (["--device", "cuda", "--head-size", "64", "--dtype", "int8"], "--dtype, --head-size with"),
        (["--device", "tpu"], "expected cpu, cuda"),
    ],
)
def test_options_that_say_nothing_there_are_refused(arguments: list[str], message: str) -> None:
    ran = invoke(*arguments)
    assert ran.exit_code == 2
    assert message in ran.stderr


# --- all of it, in the interpreter -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree that is not installed."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("kvstore", "kernels", "tools"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def script(checkout: Path, folder: Path, *arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script of a checkout as `python tools/bench_gpu.py` does, after some other code."""
    path = str(checkout / "tools" / "bench_gpu.py")
    code = (
        f"import runpy, sys; sys.path[0] = {str(checkout / 'tools')!r}; sys.argv = {[path, *arguments]!r}\n{before}\n"
    )
    code += f"try: runpy.run_path({path!r}, run_name='__main__')\n"
    code += "finally: import kvstore; print(kvstore.__file__, 'model' in sys.modules, file=sys.stderr)"
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_all_of_it_with_torch_triton_and_numpy_alone(checkout: Path, tmp_path: Path) -> None:
    blocked = f"sys.modules |= dict.fromkeys({BLOCKED!r})"
    ran = script(checkout, tmp_path, "--rehearse", "--json", "out.json", before=blocked)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[-1] == f"{checkout}/kvstore/__init__.py False"
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["complete"]
    assert set(found["correctness"].values()) == {"ok"}
    assert set(found["correctness"]) == set(Plan().forms)
    assert list(found["kernels"]) == ["BHNC", "2BNHD", "MLA"]
    operations = {"checksum", "verify", "slices", "gather", "scatter", "load", "torch", "copy", "reduce"}
    for name, sizes in found["kernels"].items():
        assert [int(nbytes) for nbytes in sizes] == list(NOTHING.call_bytes), name
        assert all(operations < set(size["operations"]) for size in sizes.values())
    assert found["end_to_end"]["host_sums"] == "numpy"
    assert found["end_to_end"]["without_disk"]["put"]["gb_per_s"] > 0
    assert found["end_to_end"]["with_disk"].startswith("left out: ")
    assert set(found["device_cost"]["microseconds"]) == {"gather", "put", "get", "verify"}
    assert "left out: " in ran.stdout
    assert "20 forms of caches are the reference's" in ran.stdout
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_store_is_measured_where_there_is_one(checkout: Path, tmp_path: Path) -> None:
    before = f"import os; os.environ['TRITON_INTERPRET'] = '1'; sys.path.insert(0, {str(checkout)!r})\n"
    before += "import kvstore.tools.gpu_run as run; run.prove = lambda *a: None"
    ran = script(checkout, tmp_path, "--rehearse", "--quick", "--json", "-", before=before)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["end_to_end"]["with_disk"]["get"]["gb_per_s"] > 0
    assert list(found["kernels"]) == ["BHNC"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kernel", ["scatter", "gather", "checksum_blocks", "checksum_slices"])
def test_a_kernel_that_does_nothing_ends_it_with_status_1(kernel: str, checkout: Path, tmp_path: Path) -> None:
    before = f"import os; os.environ['TRITON_INTERPRET'] = '1'; sys.path.insert(0, {str(checkout)!r})\n"
    before += f"import kvstore.launches as launches; launches.{kernel} = lambda *a: None"
    ran = script(checkout, tmp_path, "--rehearse", "--json", "out.json", before=before)
    assert ran.returncode == bench_gpu.MISMATCH, ran.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["errors"]["correctness"].startswith("mismatch: BHNC")
    assert "kernels" not in found
    assert found["correctness"] == {}


def test_forms_cover_what_kernels_distinguish() -> None:
    assert {form.dtype.itemsize for form in FORMS.values()} == {1, 2, 4}
    assert {"H" in form.layout for form in FORMS.values()} == {True, False}
    assert any(form.channels * form.dtype.itemsize % 16 for form in FORMS.values())
    assert Form("BNC", 584, torch.uint8, heads=1) in FORMS.values()
