"""Which way a cache takes, by where it lies: what a device without kernels costs, and what it is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import PagedKVCache, transfer
from kvstore.copyback import CopyBackPath
from kvstore.errors import GraphCapture, StagingMemoryError, UnsupportedDevice
from kvstore.route import HostRoute
from kvstore.streams import Device, stream_is_capturing
from kvstore.transfer import kv_checksum_platform_supported, route_of
from tests.support import block_hashes, canonical, make_cache, open_store

HASHES = block_hashes(5)
IDS = [6, 1, 7, 0, 3]
CPU = torch.device("cpu")


def on(device: str, cache: PagedKVCache) -> PagedKVCache:
    """The cache, taken to be on another device whose memory the CPU happens to reach."""
    for group in cache.groups.values():
        object.__setattr__(group, "device", torch.device(device))
    return cache


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that a transfer waited for in the caller's thread."""
    found: list[torch.device] = []
    monkeypatch.setattr(transfer, "wait_for_caller", found.append)
    return found


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.both
@pytest.mark.parametrize("layout", ["BHNC", "2BNHD", "BHND"])
def test_a_device_without_kernels_stores_and_verifies_and_says_so(
    layout: str, waits: list[torch.device], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = on("mps", make_cache(layout, seed=1)), on("mps", make_cache(layout, seed=2))
    tokens = 5 * 4 - 1
    past = canonical(target, [2])
    with open_store(tmp_path, source) as store:
        assert store.put_blocks(HASHES, IDS, num_tokens=tokens).stored.all()
        loader = store.attach(target)
        assert loader.get_blocks(HASHES, [5, 4, 3, 1, 2], num_tokens=tokens).verified.all()
    assert np.array_equal(canonical(target, [5, 4, 3, 1]), canonical(source, IDS[:4]))
    cells = (np.concatenate(list(rows)).reshape(-1, 4, 64) for rows in (canonical(target, [2]), past))
    now, was = cells
    assert np.array_equal(now[:, 3], was[:, 3]), "a slot past the valid tokens was written"
    assert len(waits) == 2
    said = warnings_of(caplog)
    assert len(said) == 2
    assert all("Triton does not compile for mps" in text and "copied to the host" in text for text in said)


@pytest.mark.both
def test_what_goes_astray_on_a_device_without_kernels_is_refused(
    waits: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = on("mps", make_cache(seed=1)), on("mps", make_cache(seed=2))
    with open_store(tmp_path, source) as store:
        store.put_blocks(HASHES, IDS)
        monkeypatch.setattr("kvstore.copyback.Mirrored.push", lambda *_: None)
        got = store.attach(target).get_blocks(HASHES, IDS)
    assert not got.verified.any()
    assert [r.kind for r in got.rejected.values()] == ["content"] * 5
    assert not any(r.condemned for r in got.rejected.values())


@pytest.mark.parametrize("device", ["cuda:0", "xpu:0"])
def test_a_device_that_does_not_work_is_served_by_the_host(
    device: str, waits: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    """No accelerator is here, so the check of the kernels fails."""
    if torch.accelerator.is_available():
        device = "xpu:0" if torch.cuda.is_available() else "cuda:0"
    cache = on(device, make_cache())
    route = route_of(cache, 0)
    assert isinstance(route, HostRoute)
    assert isinstance(route.path, CopyBackPath)
    assert len(warnings_of(caplog)) == 1
    assert device in warnings_of(caplog)[0]


def test_cells_that_are_no_runs_of_words_go_by_the_host(
    waits: list[torch.device], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "_unserved", lambda device: None)
    tensor = torch.zeros((6, 2, 4, 64), dtype=torch.uint8)[..., ::2]
    cache = on("cuda:0", PagedKVCache.from_tensors({"layers.0": tensor}, "BHNC"))
    assert isinstance(route_of(cache, 0), HostRoute)
    assert "keep the channels last" in warnings_of(caplog)[0]


@pytest.mark.parametrize("device", [None, "cpu", "mps", "xla:0"])
def test_no_kernel_serves_what_triton_does_not_compile_for(device: str | None) -> None:
    if device is None and torch.accelerator.is_available():
        assert isinstance(kv_checksum_platform_supported(), bool)
        return
    assert not kv_checksum_platform_supported(device)


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in str(transfer._unserved(torch.device("cuda:0")))


def test_a_group_lies_on_one_device() -> None:
    tensors = {f"layers.{i}": torch.zeros((3, 2, 4, 64), dtype=torch.uint8) for i in range(2)}

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")  # type: ignore[assignment]

    tensors["layers.1"] = tensors["layers.1"].as_subclass(Elsewhere)
    with pytest.raises(UnsupportedDevice, match=r"layers.1 is on cuda:1, layers.0 on cpu"):
        PagedKVCache.from_tensors(tensors, "BHNC")
    k, v = (torch.zeros((3, 2, 4, 32), dtype=torch.uint8) for _ in range(2))
    with pytest.raises(UnsupportedDevice, match="K is on cpu, V on cuda:1"):
        PagedKVCache.from_tensors({"layers.0": (k, v.as_subclass(Elsewhere))}, "BHND")


class Stream:
    """A stream as torch has them."""

    def __init__(self, capturing: bool) -> None:
        self.device, self._capturing = CPU, capturing

    def is_capturing(self) -> bool:
        return self._capturing


def test_a_capturing_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream_is_capturing(Stream(True))  # type: ignore[arg-type]
    assert not stream_is_capturing(Stream(False))  # type: ignore[arg-type]
    assert not stream_is_capturing(object.__new__(type("Old", (), {"device": CPU})))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(True))
    with pytest.raises(GraphCapture, match="outside of the capture"):
        Device(CPU).mark()


def test_staging_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", full)
    for allocate in (Device(CPU).memory, Device(CPU).pinned):
        with pytest.raises(StagingMemoryError, match=r"4096 bytes of .* memory .*batch_bytes"):
            allocate(4096)


# --- on a GPU ----------------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpu_cache(layout: str, seed: int) -> PagedKVCache:
    tensors = make_cache(layout, seed=seed, heads=4, head_size=64, blocks=32).tensors
    moved = {n: t.cuda() if isinstance(t, torch.Tensor) else tuple(p.cuda() for p in t) for n, t in tensors.items()}
    return PagedKVCache.from_tensors(moved, layout)


def blocks_of(cache: PagedKVCache, ids: list[int], layout: str) -> Any:
    moved = {n: t.cpu() if isinstance(t, torch.Tensor) else tuple(p.cpu() for p in t) for n, t in cache.tensors.items()}
    return canonical(PagedKVCache.from_tensors(moved, layout), ids)


@pytest.mark.both
@needs_gpu
@pytest.mark.parametrize("layout", ["BHNC", "2BNHD", "B2NHD", "BHND"])
def test_a_gpu_stores_and_loads(layout: str, tmp_path: Path) -> None:
    assert kv_checksum_platform_supported("cuda")
    source, target = gpu_cache(layout, 1), gpu_cache(layout, 2)
    with open_store(tmp_path, source) as store:
        loader = store.attach(target)
        assert not isinstance(store._views[0].route, HostRoute)
        assert store.put_blocks(HASHES, IDS, num_tokens=19).stored.all()
        assert loader.get_blocks(HASHES, [30, 4, 3, 1, 2], num_tokens=19).verified.all()
    assert np.array_equal(blocks_of(target, [30, 4, 3, 1], layout), blocks_of(source, IDS[:4], layout))


@pytest.mark.both
@needs_gpu
def test_a_gpus_pending_work_comes_first_and_its_memory_is_kept(tmp_path: Path) -> None:
    source, target = gpu_cache("BHNC", 1), gpu_cache("BHNC", 2)
    new = {name: torch.randn_like(tensor) for name, tensor in source.tensors.items()}
    torch.cuda.synchronize()
    with open_store(tmp_path, source) as store:
        loader = store.attach(target)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100_000_000)
            for name, tensor in source.tensors.items():
                tensor.copy_(new[name])
            assert store.put_blocks(HASHES, IDS).stored.all()
        assert loader.get_blocks(HASHES, IDS).verified.all()
        for name, tensor in target.tensors.items():
            assert torch.equal(tensor[IDS], new[name][IDS])
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        more = block_hashes(5, "more")
        assert store.put_blocks(more, IDS).stored.all()
        assert loader.get_blocks(more, IDS).verified.all()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
