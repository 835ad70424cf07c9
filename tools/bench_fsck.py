"""`kvstore bench --fsck`: how long kvstore-fsck takes, beside `cat` of the same file.

Stores of one size of records each are made and read once, so that they lie in the page cache. Then `cat data.mdb >
/dev/null` and `kvstore-fsck --jobs 2` take turns, each as a whole command: a process is started, and has ended when the clock
stops. Medians are reported, of the rounds' ratios too. A store of many small records shows what a record costs that has
hardly any bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvstore import CacheIdentity, KVStore, PagedKVCache, StoreConfig
from kvstore.storefile import DATA_NAME
from kvstore.tools.bench_limits import base_folder, file_system
from kvstore.tools.bench_report import machine, spread, versions
from kvstore.tools.bench_subject import MIB, BenchError, Geometry, make_layers

JOBS: Final = 2
SMALL_RECORDS: Final = 100_000
LAYOUT: Final = "BHNC"
ROWS: Final = {
    "2_mib": Geometry(layers=32, heads=8, tokens=16, head_size=128),
    "64_kib": Geometry(layers=8, heads=4, tokens=8, head_size=64),
}
"""A block of 16 tokens of a model with 8B parameters, and a small one."""
SMALL: Final = Geometry(layers=2, heads=1, tokens=8, head_size=64)
"""Records of 4 KiB."""
CACHE_BYTES: Final = 64 * MIB
"""Of the cache whose blocks are stored over and over."""
CACHE_BLOCKS: Final = 1024
ROOM: Final = 1.3
"""Bytes of the file, at most, over those of its blocks; of the smallest records OVERHEAD more for each."""
OVERHEAD: Final = 2**13
SPARE_BYTES: Final = 2**29
BLOCK_BYTES: Final = 512
"""Of ru_inblock."""
COLD_SHARE: Final = 0.01
OWN_BYTES: Final = 2**25
"""How much of a file, and besides of a command's own code, may come from the disk: above that nothing warm was measured."""
FSCK: Final = (sys.executable, "-c", "import sys; from kvstore.tools.fsck import main; sys.exit(main())")
"""What the installed script `kvstore-fsck` does."""
STEPS: Final = ("cat", "fsck", "quick")

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Spent:
    """What a command took: seconds from its start to its end, seconds of CPUs, bytes from the disk."""

    seconds: float
    cpu: float
    disk: int


def num_steps(repeat: int) -> int:
    """How often `run` calls its tick."""
    return (len(ROWS) + 1) * (2 + len(STEPS) * repeat)


def run(
    store_bytes: int,
    repeat: int,
    path: Path | None,
    seed: int,
    tick: Tick = lambda what: None,
    small_records: int = SMALL_RECORDS,
) -> dict[str, Any]:
    """Measure; the report of `kvstore bench --fsck --json`.

    store_bytes: of the blocks in each store. path: the folder in which a temporary folder is made, used and removed; by
    default $TMPDIR or the current one. tick: called before each step with its name. Raises BenchError where there is too
    little room, a file did not stay in the page cache, or a check did not find every record intact.
    """
    base, load = base_folder(path, BenchError), os.getloadavg()[0]
    counts = {name: max(1, store_bytes // geometry.block_bytes) for name, geometry in ROWS.items()}
    stores = [(ROWS[name], count) for name, count in counts.items()] + [(SMALL, small_records)]
    check_room(max(_most_bytes(geometry, count) for geometry, count in stores), base)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder:
        measure = _Measure(Path(folder), repeat, seed, tick)
        found = {name: measure.row(ROWS[name], count) for name, count in counts.items()}
        small, kind = measure.row(SMALL, small_records), file_system(Path(folder))
    spreads = {f"fsck_vs_cat_{name}": row.pop("ratio") for name, row in (found | {"small": small}).items()}
    return {
        "ratios": {name: values["median"] for name, values in spreads.items()},
        "ratio_spreads": spreads,
        "rows": found,
        "small": small,
        "jobs": JOBS,
        "repeat": repeat,
        "machine": machine() | {"file_system": kind, "load_before": load},
        "versions": versions(),
    }


def _most_bytes(geometry: Geometry, count: int) -> int:
    return round(count * (ROOM * geometry.block_bytes + OVERHEAD))


def check_room(nbytes: int, base: Path) -> None:
    """Raise BenchError unless a file of so many bytes fits on the disk and into the page cache."""
    for what, there in (("memory", _free_memory()), (f"disk at {base}", shutil.disk_usage(base).free)):
        if nbytes + SPARE_BYTES > there:
            raise BenchError(
                f"a store of {nbytes / 1e9:.1f} GB that is to stay in memory needs {(nbytes + SPARE_BYTES) / 1e9:.1f} GB of "
                f"{what}, {there / 1e9:.1f} GB are there: give a smaller --store-mib, or another --path"
            )


def _free_memory() -> int:
    """Bytes that the page cache may have, as far as the kernel says."""
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")


class _Measure:
    """Stores that are made, measured and removed, one after another."""

    def __init__(self, folder: Path, repeat: int, seed: int, tick: Tick) -> None:
        self._folder, self._repeat, self._seed, self._tick = folder, repeat, seed, tick

    def row(self, geometry: Geometry, count: int) -> dict[str, Any]:
        """What a store of so many records comes to."""
        self._tick("make")
        store = self._folder / "store"
        data = make_store(store, geometry, count, self._seed)
        self._tick("warm")
        timed(("cat", str(data)))
        check_clean(store, count)
        nbytes = data.stat().st_size
        spent = self._rounds(store, data, nbytes)
        shutil.rmtree(store)
        seconds = {name: [one.seconds for one in some] for name, some in spent.items()}
        return {
            "records": count,
            "block_bytes": geometry.block_bytes,
            "file_bytes": nbytes,
            "seconds": {name: spread(values) for name, values in seconds.items()},
            "cpu_seconds": {name: spread([one.cpu for one in some]) for name, some in spent.items()},
            "mb_per_s": {name: spread([nbytes / s / 1e6 for s in seconds[name]]) for name in ("cat", "fsck")},
            "ratio": spread([cat / fsck for cat, fsck in zip(seconds["cat"], seconds["fsck"], strict=True)]),
        }

    def _rounds(self, store: Path, data: Path, nbytes: int) -> dict[str, list[Spent]]:
        check = (*FSCK, "--jobs", str(JOBS), str(store))
        commands = dict(zip(STEPS, (("cat", str(data)), check, (*check, "--quick")), strict=True))
        found: dict[str, list[Spent]] = {name: [] for name in STEPS}
        for _ in range(self._repeat):
            for name, command in commands.items():
                self._tick(name)
                spent = timed(command)
                if spent.disk > COLD_SHARE * nbytes + OWN_BYTES:
                    raise BenchError(
                        f"{name} read {spent.disk / 1e6:.0f} MB from the disk: the file did not stay in memory: "
                        "give a smaller --store-mib"
                    )
                found[name].append(spent)
        return found


def make_store(folder: Path, geometry: Geometry, count: int, seed: int) -> Path:
    """Store so many blocks, each under a hash of its own, and have them on the disk; the file. Raises BenchError."""
    blocks = max(1, min(CACHE_BYTES // geometry.block_bytes, CACHE_BLOCKS, count))
    cache = PagedKVCache.from_tensors(make_layers(replace(geometry, blocks=blocks), LAYOUT, seed), LAYOUT)
    config = StoreConfig(capacity_bytes=max(64 * MIB, 2 * _most_bytes(geometry, count)), durability="process")
    identity = CacheIdentity(model="kvstore/bench-fsck", revision="1", dtype=geometry.dtype)
    with KVStore(folder, cache, identity, config) as store:
        for first in range(0, count, blocks):
            numbers = range(first, min(first + blocks, count))
            hashes = [hashlib.sha256(f"{seed}/{number}".encode()).digest() for number in numbers]
            if failed := store.put_blocks(hashes, range(len(hashes))).failed:
                raise BenchError(f"{len(failed)} blocks were not stored: {', '.join(sorted(set(failed.values())))}")
        data = store.folder / DATA_NAME
    with data.open("rb") as file:
        os.fsync(file.fileno())
    return data


def timed(command: Sequence[str]) -> Spent:
    """Run a command. Raises BenchError where it fails."""
    before, began = _of_children(), time.perf_counter()
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    seconds, after = time.perf_counter() - began, _of_children()
    if ran.returncode:
        told = ran.stderr.decode(errors="replace").strip()
        raise BenchError(f"{' '.join(command[3:] or command)} ended with status {ran.returncode}: {told}")
    return Spent(seconds, after[0] - before[0], (after[1] - before[1]) * BLOCK_BYTES)


def _of_children() -> tuple[float, int]:
    """Seconds of CPUs, and blocks read from the disk, of processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime, used.ru_inblock


def check_clean(store: Path, count: int) -> None:
    """Raise BenchError unless a check reads so many records and finds nothing, with nothing left out."""
    ran = subprocess.run(
        [*FSCK, "--json", str(store)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    said = json.loads(ran.stdout.splitlines()[-1]) if ran.stdout else {}
    if ran.returncode or said["records"] != count or said["findings"] or said["unchecked"]:
        raise BenchError(f"kvstore-fsck found a new store of {count} records unsound: {said or ran.stderr.strip()}")


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report in words."""
    for name, row in (report["rows"] | {"small": report["small"]}).items():
        ratio, seconds = report["ratio_spreads"][f"fsck_vs_cat_{name}"], row["seconds"]
        yield (
            f"{row['records']:,} records of {row['block_bytes'] / 1024:,.4g} KiB, {row['file_bytes'] / 1e9:.2f} GB: "
            f"cat {_figures(row, 'cat')}, kvstore-fsck {_figures(row, 'fsck')}, ratio {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f}), --quick {seconds['quick']['median']:.2f} s"
        )
    m, v = report["machine"], report["versions"]
    yield (
        f"Medians of {report['repeat']} rounds, whole commands, {report['jobs']} jobs, files in the page cache. {m['cpu']}, "
        f"{m['cpu_count']} CPUs, load before {m['load_before']:.1f}, {m['file_system'] or 'unknown file system'}, "
        f"Python {v['python']}, lmdb {v['lmdb']}, xxhash {v['xxhash']}."
    )


def _figures(row: Mapping[str, Any], name: str) -> str:
    return f"{row['mb_per_s'][name]['median']:,.0f} MB/s {row['seconds'][name]['median']:.2f} s"
