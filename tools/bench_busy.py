"""`kvstore bench --busy`: a store beside a thread that never rests.

A serving engine's main thread is often a loop of pure Python, and whoever needs the GIL beside it waits a switch interval
for each turn. Here the main thread counts in such a loop, or rests, while a second thread gets, puts or matches one prompt's
blocks over and over: once in a store with an I/O process, once in one without. Both stores hold the same blocks, and load
them into the same memory. What is compared is measured in the same round, one after the other; medians of the rounds' ratios
are reported.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from kvstore.tools.bench_limits import base_folder, file_system
from kvstore.tools.bench_report import machine, spread, versions
from kvstore.tools.bench_subject import BenchError, Caches, Geometry, Subject, check_room

BLOCKS: Final = 256
"""A prompt of 4,096 tokens."""
STORES: Final = {"process": "process", "inline": "inline"}
"""{name of a store in the report: its io}."""
SECONDS: Final = 0.5
"""The least time that a measurement takes: calls are repeated until it is over."""
WARM_ROUNDS: Final = 1
MEMORY_FACTOR: Final = 6
"""Bytes of memory over those of all blocks: source, target, both stores' files twice put."""
DISK_FACTOR: Final = 4
TURNS: Final = 1000
"""Turns of the busy loop between two looks at whether the calls have ended."""
LOOP: Final = "loop"
ROUNDS: Final = (
    (
        *(LOOP, "process_get_busy", "process_get_idle", "inline_get_idle", "inline_get_busy"),
        *("process_match_idle", "process_match_busy", "inline_match_idle", "inline_match_busy"),
    ),
    ("process_put_idle", "process_put_busy", "inline_put_idle", "inline_put_busy"),
)
"""The measurements of a round that only reads, and of one that writes; those that are compared stand side by side."""
SLOW: Final = {"inline_get_busy": 3, "inline_put_busy": 1}
"""In how many of the first measured rounds these are taken: a call may take a hundred times as long as elsewhere."""
RATIOS: Final = {
    "busy_get_vs_idle": ("process_get_busy", "process_get_idle"),
    "process_get_vs_inline": ("process_get_idle", "inline_get_idle"),
    "busy_get_vs_idle_inline": ("inline_get_busy", "inline_get_idle"),
}
"""Ratios of calls a second. `busy_loop_vs_alone` is one of turns a second."""

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One measurement: seconds a call, and the busy loop's turns a second meanwhile; 0 where the main thread rested."""

    seconds: float
    turns: float


Samples = dict[str, list[Sample]]


def steps_of(repeat: int) -> Iterator[tuple[str, bool]]:
    """All measurements in their order, and whether each counts: those of warm rounds do not."""
    for steps in ROUNDS:
        for number in range(-WARM_ROUNDS, repeat):
            yield from ((step, number >= 0) for step in steps if step not in SLOW or 0 <= number < SLOW[step])


def num_steps(repeat: int) -> int:
    """How often `run` calls its tick."""
    return len(list(steps_of(repeat)))


def run(
    geometry: Geometry,
    layout: str,
    repeat: int,
    path: Path | None,
    tick: Tick = lambda what: None,
    stores: Mapping[str, str] = STORES,
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Measure both stores; the report of `kvstore bench --busy --json`.

    path: the folder in which a temporary folder is made, used and removed; by default $TMPDIR or the current one.
    tick: called before each measurement with its name. stores: the io of "process" and of "inline". seconds: the least
    time of a measurement. Raises BenchError where there is too little room or a block was not stored, verified or
    matched, and whatever KVStore and PagedKVCache raise.
    """
    geometry.check(layout)
    base = base_folder(path, BenchError)
    check_room(geometry, base, MEMORY_FACTOR, DISK_FACTOR)
    caches, load = Caches(geometry, layout), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder, ExitStack() as stack:
        subjects = {
            name: stack.enter_context(Subject(Path(folder) / name, caches, "process", io))
            for name, io in stores.items()
        }
        pool = stack.enter_context(ThreadPoolExecutor(1))
        samples = _measured(Beside(pool, seconds), subjects, repeat, tick)
        threads, kind = threading.active_count(), file_system(Path(folder))
        for subject in subjects.values():
            _compare(subject, caches)
    found = machine() | {"file_system": kind, "torch_threads": torch.get_num_threads(), "python_threads": threads}
    found["load_before"] = load
    return _report(samples, caches, repeat) | {"stores": dict(stores), "machine": found}


def _measured(beside: Beside, subjects: Mapping[str, Subject], repeat: int, tick: Tick) -> Samples:
    """All rounds that only read, then all that write."""
    calls: dict[str, Callable[[], None]] = {}
    for name, subject in subjects.items():
        subject.put()
        subject.put()
        calls |= {f"{name}_get": subject.get, f"{name}_match": subject.match, f"{name}_put": subject.put}
    found: Samples = {}
    for step, counts in steps_of(repeat):
        tick(step)
        call, _, main = step.rpartition("_")
        sample = beside.measure(calls[call], main == "busy") if call else beside.alone()
        if counts:
            found.setdefault(step, []).append(sample)
    return found


class Beside:
    """Calls in another thread, for `seconds` at least, while the caller's thread loops or rests."""

    def __init__(self, pool: ThreadPoolExecutor, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds

    def measure(self, call: Callable[[], None], busy: bool) -> Sample:
        """Repeat a call. Raises what it raises."""
        return self._sample(lambda: _repeat(call, self._seconds), busy)

    def alone(self) -> Sample:
        """The busy loop while the other thread sleeps."""
        return self._sample(lambda: _repeat(lambda: time.sleep(self._seconds), 0), True)

    def _sample(self, work: Callable[[], float], busy: bool) -> Sample:
        job, began = self._pool.submit(work), time.perf_counter()
        turns = spin(job) / (time.perf_counter() - began) if busy else 0.0
        return Sample(job.result(), turns)


def spin(job: Future[float]) -> int:
    """The busy loop: turns until a job is done. It never gives the GIL away by itself."""
    turns, state = 0, 1
    while not job.done():
        for _ in range(TURNS):
            state = state * 1_103_515_245 + 12_345 & 0x7FFFFFFF
        turns += TURNS
    return turns


def _repeat(call: Callable[[], None], least: float) -> float:
    """Seconds a call, repeated until so many seconds are over."""
    calls, began = 0, time.perf_counter()
    while True:
        call()
        calls += 1
        if (spent := time.perf_counter() - began) >= least:
            return spent / calls


def _compare(subject: Subject, caches: Caches) -> None:
    """One more get, into cleared memory, is compared byte by byte."""
    caches.clear_target()
    subject.get()
    caches.check_equal()


def _report(samples: Samples, caches: Caches, repeat: int) -> dict[str, Any]:
    geometry = caches.geometry
    ratios = {name: spread(values) for name, values in _ratios(samples).items()}
    return {
        "ratios": {name: values["median"] for name, values in ratios.items()},
        "ratio_spreads": ratios,
        "figures": {step: _figures(step, some, geometry) for step, some in samples.items() if step != LOOP},
        "turns_per_s": {step: spread([s.turns for s in some]) for step, some in samples.items() if some[0].turns},
        "blocks_per_call": geometry.blocks,
        "block_bytes": geometry.block_bytes,
        "bytes_per_call": geometry.total_bytes,
        "layout": caches.layout,
        "loops": caches.loops,
        "geometry": geometry.describe(),
        "repeat": repeat,
        "switch_interval_s": sys.getswitchinterval(),
        "versions": versions(),
    }


def _ratios(samples: Samples) -> dict[str, list[float]]:
    """Each ratio, round by round; of the first rounds alone where one side is of SLOW."""
    found = {
        name: [two.seconds / one.seconds for one, two in zip(samples[above], samples[below], strict=False)]
        for name, (above, below) in RATIOS.items()
    }
    loops = zip(samples["process_get_busy"], samples[LOOP], strict=True)
    return found | {"busy_loop_vs_alone": [beside.turns / alone.turns for beside, alone in loops]}


def _figures(step: str, samples: list[Sample], geometry: Geometry) -> dict[str, dict[str, float]]:
    """Milliseconds a call, and GB/s where bytes are moved."""
    found = {"ms": spread([1e3 * s.seconds for s in samples])}
    if "_match_" not in step:
        found["gb_per_s"] = spread([geometry.total_bytes / s.seconds / 1e9 for s in samples])
    return found


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The report in words."""
    m, g, mib = report["machine"], report["geometry"], 2**20
    yield (
        f"{report['blocks_per_call']} blocks of {report['block_bytes'] / mib:.4g} MiB, {g['tokens']} tokens each, "
        f"{report['bytes_per_call'] / mib:.4g} MiB a call; {report['layout']}, {g['layers']} layers, {g['heads']} heads"
    )
    figures = report["figures"]
    for step, idle in figures.items():
        if step.endswith("_idle"):
            name, what, _ = step.split("_")
            yield f"io={report['stores'][name]:8} {what:6} {_pair(idle, figures[f'{name}_{what}_busy'])}"
    for name, value in report["ratios"].items():
        seen = report["ratio_spreads"][name]
        yield f"{name:24} {value:.3f} ({seen['min']:.3f} to {seen['max']:.3f})"
    yield (
        f"Medians of {report['repeat']} rounds. {m['cpu']}, {m['cpu_count']} CPUs, load before {m['load_before']:.1f}, "
        f"{m['python_threads']} Python threads, "
        f"GIL switch interval {1e3 * report['switch_interval_s']:g} ms, {report['loops']} loops, "
        f"{m['file_system'] or 'unknown file system'}, Python {report['versions']['python']}."
    )


def _pair(idle: Mapping[str, Any], busy: Mapping[str, Any]) -> str:
    """A call beside a resting thread, and beside a busy one."""
    told = [
        f"idle {_figure(idle)}",
        f"busy {_figure(busy)}",
        f"ratio {idle['ms']['median'] / busy['ms']['median']:.3f}",
    ]
    return ", ".join(told)


def _figure(found: Mapping[str, Any]) -> str:
    rate = f"{found['gb_per_s']['median']:6.2f} GB/s " if "gb_per_s" in found else " " * 12
    return f"{rate}{found['ms']['median']:9.3f} ms"
