"""The benchmark runs: what it measures is measured by hand (`make bench-vllm`), on a machine that does nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.tools import bench_vllm


def test_a_look_up_is_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_vllm, "LOOKUP_BLOCKS", 40)
    monkeypatch.setattr(bench_vllm, "LOOKUPS", 10)
    seconds = bench_vllm.lookup(1, tmp_path)
    assert len(seconds) == 8
    assert min(seconds) > 0
    steps = {arm: {"prefill": 1.0, "decode": 1.0} for arm in bench_vllm.ARMS}
    row = {"tokens": 256, "cold_s": 1.0, "hit_s": 0.25, "computed": 32}
    found = {"blocks": 40, "median_ms": 1.5, "slowest_ms": 2.5}
    machine = {"cores": 2, "threads_of_the_engine": 1}
    bench_vllm.show({"machine": machine, "model": "m", "first_token": [row], "steps": steps, "lookup": found})
    assert "4.0x   32" in capsys.readouterr().out
