"""The benchmark behind `kvstore bench`: put and get against this machine's limits, measured in the same run.

Machines drift and share their memory and disks, so a store's measurement is set against a limit's that was taken
right beside it, round by round, and the median of the rounds' ratios is reported.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.tools.bench_limits import Limits, base_folder, file_system
from kvstore.tools.bench_report import RATIOS, machine, ratio_of, spread, versions
from kvstore.tools.bench_subject import BenchError, Caches, Geometry, Subject, check_room
from kvstore.tools.bench_table import table_cost

WARM_ROUNDS = 3
"""Rounds before the measured ones: both starts have been put and freed pages are being used again."""
MEMORY_FACTOR = 4
"""Bytes of memory over those of all blocks: source, target and the limits' two buffers."""
DISK_FACTOR = 3
"""Bytes of disk over those of all blocks: the store being overwritten and the limits' file."""
MEASURES = ("pwrite_sync", "put_sync", "sum", "checksum", "put_nosync", "memcpy", "get_verified", "pwrite", "pread")
"""All measurements in the order of a round; those that are compared stand side by side."""

Seconds = dict[str, list[float]]
Tick = Callable[[str], None]


def num_steps(layouts: Sequence[str], repeat: int) -> int:
    """How often `run` calls its tick."""
    return len(layouts) * (repeat + WARM_ROUNDS) * len(MEASURES)


def run(
    geometry: Geometry, layouts: Sequence[str], repeat: int, path: Path | None, tick: Tick = lambda what: None
) -> dict[str, Any]:
    """Measure each layout; the report of `kvstore bench --json`.

    path: the folder in which a temporary folder is made, used and removed; by default $TMPDIR or the current one.
    tick: called before each measurement with its name. Raises BenchError where there is too little room or a block
    was not stored or verified, and whatever KVStore and PagedKVCache raise.
    """
    for layout in layouts:
        geometry.check(layout)
    base = base_folder(path, BenchError)
    check_room(geometry, base, MEMORY_FACTOR, DISK_FACTOR)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder:
        found = {layout: _layout(geometry, layout, repeat, Path(folder), tick) for layout in layouts}
        kind = file_system(Path(folder))
    first = found[layouts[0]]
    return {
        "ratios": first["ratios"],
        "gb_per_s": {name: values["median"] for name, values in first["gb_per_s"].items()},
        "slice_table": first["slice_table"],
        "layout": layouts[0],
        "layouts": found,
        "geometry": geometry.describe(),
        "repeat": repeat,
        "machine": machine() | {"file_system": kind, "torch_threads": torch.get_num_threads(), "threads": 1},
        "versions": versions(),
    }


def _layout(geometry: Geometry, layout: str, repeat: int, folder: Path, tick: Tick) -> dict[str, Any]:
    caches = Caches(geometry, layout)
    seconds = _synced(caches, folder, repeat, tick) | _unsynced(caches, folder, repeat, tick)
    rates = {name: [geometry.total_bytes / s / 1e9 for s in seconds[name]] for name in MEASURES}
    ratios = {name: spread(ratio_of(rates, name)) for name in RATIOS}
    return {
        "loops": caches.loops,
        "ratios": {name: values["median"] for name, values in ratios.items()},
        "ratio_spreads": ratios,
        "slice_table": table_cost(geometry, seconds["put_nosync"], folder),
        "gb_per_s": {name: spread(values) for name, values in rates.items()},
    }


def _synced(caches: Caches, folder: Path, repeat: int, tick: Tick) -> Seconds:
    """Put with a sync each transaction. First of all, while no unsynced bytes wait for the disk."""
    with (
        Subject(folder / "synced", caches, "commit") as subject,
        Limits(folder / "limit", caches.geometry.total_bytes, subject.batch_bytes) as limits,
    ):
        seconds = _rounds(repeat, {"pwrite_sync": limits.pwrite_sync, "put_sync": subject.put}, tick)
    shutil.rmtree(folder / "synced")
    return seconds


def _unsynced(caches: Caches, folder: Path, repeat: int, tick: Tick) -> Seconds:
    """Everything that stays in memory: checksums, put without sync, get. The last get lands in cleared memory and
    is compared byte by byte."""
    with (
        Subject(folder / "unsynced", caches, "process") as subject,
        Limits(folder / "limit", caches.geometry.total_bytes, subject.batch_bytes) as limits,
    ):
        steps = {"sum": caches.plain_sum, "checksum": caches.checksum, "put_nosync": subject.put}
        steps |= {"memcpy": limits.memcpy, "get_verified": subject.get, "pwrite": limits.pwrite, "pread": limits.pread}
        seconds = _rounds(repeat, steps, tick)
        caches.clear_target()
        subject.get()
        caches.check_equal()
    shutil.rmtree(folder / "unsynced")
    return seconds


def _rounds(repeat: int, steps: Mapping[str, Callable[[], None]], tick: Tick) -> Seconds:
    """Seconds of each step in `repeat` rounds, after warm ones whose times do not count."""
    seconds: Seconds = {name: [] for name in steps}
    for number in range(-WARM_ROUNDS, repeat):
        for name, step in steps.items():
            tick(name)
            began = time.perf_counter()
            step()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds
