"""States on a device: copied to the host and back by torch, verified by a kernel in Triton's interpreter, or by the host.

Triton reads TRITON_INTERPRET when a kernel is defined, so this file runs itself in a process of its own (as
test_devicepath.py does).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore import KVStore, StateTensor, StoreConfig, block_checksums, transfer
from kvstore.cache import PagedKVCache
from kvstore.route import HostRoute
from kvstore.statecopy import StateCopyPath
from kvstore.transfer import route_of
from tests.state_cases import (
    FORMS,
    GROUP,
    SLOTS,
    States,
    cache_of,
    mamba,
    reference_sum,
    snapshot,
    strided,
    with_tensors,
)
from tests.support import MIB, block_hashes, open_store, random_tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROOT = Path(__file__).parent.parent
TINY = StoreConfig(capacity_bytes=16 * MIB, durability="process", batch_bytes=1)
HASHES = block_hashes(3)
IDS, OTHERS = [3, 0, 4], [1, 2, 0]
STATES = [form for form in FORMS if form != "a rank's part"]

if INTERPRETED:
    from kvstore import stateroute
    from kvstore.launches import StateLaunches, state_forms, states_unserved
    from kvstore.stateroute import StateRoute, unfit_states
    from tests.test_devicepath import LateDevice


def interpreted(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test that the interpreter's process collects, and this one does not."""
    return test if INTERPRETED else None


def by_host(test: Callable[..., None]) -> Callable[..., None] | None:
    """A test that the interpreter's process need not repeat."""
    return None if INTERPRETED else test


@by_host
def test_all_of_this_file_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


# --- a device that no kernel serves ----------------------------------------------------------------------------------


def on(device: str, cache: PagedKVCache) -> PagedKVCache:
    """The cache, whose states are taken to be on another device whose memory the CPU happens to reach."""
    object.__setattr__(cache.state_groups[GROUP], "device", torch.device(device))
    return cache


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that a transfer waited for in the caller's thread."""
    found: list[torch.device] = []
    monkeypatch.setattr(transfer, "wait_for_caller", found.append)
    return found


@by_host
@pytest.mark.both(cases=2)
@pytest.mark.parametrize("form", STATES)
def test_states_are_copied_back_where_no_kernel_is(
    form: str, tmp_path: Path, waits: list[torch.device], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = FORMS[form](1), FORMS[form](2)
    before = snapshot(target)
    with open_store(tmp_path, on("mps", cache_of(source)), TINY) as store:
        assert store.put_blocks(HASHES, IDS, group=GROUP).stored.all()
        loader = store.attach(on("mps", cache_of(target)))
        assert loader.get_blocks(HASHES, OTHERS, group=GROUP).verified.all()
    assert np.array_equal(snapshot(target)[OTHERS], snapshot(source)[IDS])
    assert np.array_equal(snapshot(target)[[3, 4]], before[[3, 4]])
    assert len(waits) == 2
    assert (
        sum("no kernel sums its states (Triton does not compile for mps)" in r.getMessage() for r in caplog.records)
        == 2
    )


@by_host
@pytest.mark.parametrize("form", FORMS)
def test_sums_of_what_was_copied_back_are_the_reference(form: str, waits: list[torch.device]) -> None:
    states = FORMS[form](3)
    found = block_checksums(on("mps", cache_of(states, tp_rank=2)), IDS, group=GROUP)
    assert found.tolist() == [reference_sum(states, slot, tp_rank=2) for slot in IDS]


@by_host
def test_a_mirror_smaller_than_a_call_is_used_again(
    waits: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvstore.statecopy.MIRROR_BYTES", 1)
    source, target = strided(1), with_tensors(strided(1), 2)
    caches = [on("mps", cache_of(states)) for states in (source, target)]
    path = route_of(caches[0], GROUP).path  # type: ignore[attr-defined]
    assert isinstance(path, StateCopyPath)
    assert path._step == 1
    assert block_checksums(caches[0], IDS, group=GROUP).tolist() == [reference_sum(source, slot) for slot in IDS]
    with open_store(tmp_path, caches[0]) as store:
        assert store.put_blocks(HASHES, IDS, group=GROUP).stored.all()
        assert store.attach(caches[1]).get_blocks(HASHES, OTHERS, group=GROUP).verified.all()
    assert np.array_equal(snapshot(target)[OTHERS], snapshot(source)[IDS])


@by_host
def test_what_goes_astray_on_the_way_to_a_device_is_refused(
    waits: list[torch.device], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open_store(tmp_path, on("mps", cache_of(mamba(1)))) as store:
        store.put_blocks(HASHES, IDS, group=GROUP)
        monkeypatch.setattr("kvstore.copyback.Mirrored.push", lambda *_: None)
        got = store.attach(on("mps", cache_of(mamba(2)))).get_blocks(HASHES, OTHERS, group=GROUP)
    assert [(r.kind, r.condemned) for r in got.rejected.values()] == [("content", False)] * 3


# --- the kernel ------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device; states made from now on lie on it."""
    late, ready = LateDevice(), list[int]()

    def route(cache: PagedKVCache, group: Any) -> Any:
        return StateRoute(StateCopyPath(cache, group), group, lambda: ready.append(1), late)

    monkeypatch.setattr(transfer, "_make_state_route", route)
    return late


@interpreted
@pytest.mark.parametrize("form", [form for form in FORMS if form != "strided"])
def test_the_kernels_sums_are_the_reference(form: str, device: Any) -> None:
    states = FORMS[form](3)
    cache = cache_of(states, tp_rank=2)
    waits = device.gets.waits
    found = block_checksums(cache, IDS, group=GROUP)
    assert found.tolist() == [reference_sum(states, slot, tp_rank=2) for slot in IDS]
    assert device.gets.waits > waits, "a kernel ran"


@interpreted
def test_a_call_of_more_slots_than_a_launch_has(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateroute, "SLOTS_AT_ONCE", 2)
    states = mamba(3)
    found = block_checksums(cache_of(states), range(SLOTS), group=GROUP)
    assert found.tolist() == [reference_sum(states, slot) for slot in range(SLOTS)]


@interpreted
def test_states_of_one_form_are_one_launch() -> None:
    states = {f"layers.{i}": next(iter(mamba(i).values())) for i in range(6)}
    group = PagedKVCache.from_tensors({}, "BNC", states=states, state_block_size={0: 1}).state_groups[0]
    assert sorted(map(len, state_forms(group).values())) == [6, 6]
    assert len(StateLaunches(group, torch.device("cpu"))._tables) == 2


@interpreted
@pytest.mark.parametrize("form", ["mamba", "pages"])
def test_states_go_to_disk_and_back_and_the_kernel_verifies_them(form: str, device: Any, tmp_path: Path) -> None:
    source, target = FORMS[form](1), FORMS[form](2)
    with open_store(tmp_path, cache_of(source), TINY, io="inline") as store:
        assert store.put_blocks(HASHES, IDS, group=GROUP).stored.all()
        loader, waits = store.attach(cache_of(target)), device.gets.waits
        assert loader.get_blocks(HASHES, OTHERS, group=GROUP).verified.all()
        assert device.gets.waits > waits
    assert np.array_equal(snapshot(target)[OTHERS], snapshot(source)[IDS])


@interpreted
def test_the_kernel_sees_what_went_astray(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = mamba(1), mamba(2)
    scatter = StateCopyPath.scatter

    def astray(path: Any, span: Any, staging: Any) -> None:
        scatter(path, span, staging)
        conv = target["model.layers.12.mixer"][0].tensor
        conv[2, [4, 5]] = conv[2, [5, 4]]

    with open_store(tmp_path, cache_of(source), TINY, io="inline") as store:
        store.put_blocks(HASHES, IDS, group=GROUP)
        monkeypatch.setattr(StateCopyPath, "scatter", astray)
        got = load_one(store, target)
    assert (got.kind, got.condemned) == ("content", False)
    assert "layer 12 state rows" in got.detail


def load_one(store: KVStore, target: States) -> Any:
    return store.attach(cache_of(target)).get_blocks(HASHES[1:2], [2], start=1, group=GROUP).rejected[0]


@interpreted
def test_what_the_kernel_cannot_sum_is_said(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    five = random_tensor((3, 4, 6, 5, 10), torch.float32, 1).permute(0, 3, 1, 4, 2)[..., ::2]
    group = cache_of({"layers.0": [StateTensor(five, 1)]}).state_groups[GROUP]
    assert "axes that do not merge" in str(states_unserved(group))
    assert "axes that do not merge" in str(unfit_states(group, device))
    fine = cache_of(mamba()).state_groups[GROUP]
    assert unfit_states(fine, device) is None
    monkeypatch.setattr(stateroute.StateSums, "__call__", lambda sums, span: np.zeros(len(span), np.uint64))
    assert unfit_states(fine, device) == "the sums of states are not the host's"
    monkeypatch.setattr(stateroute.StateSums, "__call__", lambda sums, span: 1 // 0)
    assert "ZeroDivisionError" in str(unfit_states(fine, device))


@interpreted
def test_a_device_that_is_served_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_unserved", lambda device: None)
    monkeypatch.setattr("kvstore.streams.device_of", lambda device: LateDevice())
    assert isinstance(route_of(on("cuda:0", cache_of(mamba())), GROUP), StateRoute)
    monkeypatch.setattr(stateroute, "unfit_states", lambda group, device: "it is old")
    made = route_of(on("cuda:0", cache_of(mamba(1))), GROUP)
    assert isinstance(made, HostRoute)
    assert not isinstance(made, StateRoute)
