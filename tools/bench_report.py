"""What the benchmark says: ratios, spreads, the table, and the machine it ran on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

RATIOS: Final = {
    "get_verified_vs_memcpy": ("get_verified", "memcpy"),
    "put_nosync_vs_memcpy": ("put_nosync", "memcpy"),
    "put_sync_vs_pwrite_sync": ("put_sync", "pwrite_sync"),
    "checksum_vs_sum": ("checksum", "sum"),
    "get_verified_vs_pread": ("get_verified", "pread"),
    "put_nosync_vs_pwrite": ("put_nosync", "pwrite"),
    "pread_vs_memcpy": ("pread", "memcpy"),
    "pwrite_vs_memcpy": ("pwrite", "memcpy"),
}
"""What is compared with what."""
ROWS: Final = (
    ("memcpy", "memcpy", ""),
    ("sum", "np.sum", ""),
    ("pread", "pread", "pread_vs_memcpy"),
    ("pwrite", "pwrite", "pwrite_vs_memcpy"),
    ("pwrite_sync", "pwrite+sync", ""),
    ("checksum", "checksum", "checksum_vs_sum"),
    ("get_verified", "get, verified", "get_verified_vs_memcpy"),
    ("put_nosync", "put, no sync", "put_nosync_vs_memcpy"),
    ("put_sync", "put, synced", "put_sync_vs_pwrite_sync"),
)
"""Measurement, its name, and the ratio that the table shows beside it."""
LAST_LIMIT: Final = "pwrite_sync"
PACKAGES: Final = ("kvstore", "numpy", "numba", "lmdb", "torch", "xxhash")


def spread(values: Sequence[float]) -> dict[str, float]:
    """min, median and max."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def ratio_of(rates: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """A ratio of RATIOS round by round: both rates of one round were measured close together."""
    above, below = RATIOS[name]
    return [one / two for one, two in zip(rates[above], rates[below], strict=True)]


def versions() -> dict[str, str | None]:
    """Of Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """The CPU's name as the kernel has it, and how many of them this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.machine(), "cpu_count": len(os.sched_getaffinity(0))}


def render(report: Mapping[str, Any]) -> RenderableType:
    """The report as a table, with the geometry above it and how it was measured below."""
    return Group(
        Text(_title(report), style="bold"),
        _table(report),
        Text(_slice_table(report)),
        Text(_notes(report), style="dim"),
    )


def _title(report: Mapping[str, Any]) -> str:
    g = report["geometry"]
    return (
        f"{g['blocks']} blocks of {g['block_bytes'] / 2**20:.4g} MiB: {g['layers']} layers, {g['heads']} heads, "
        f"{g['tokens']} tokens, {g['cell_bytes']}-byte cells, {g['dtype']}"
    )


def _table(report: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for layout in report["layouts"]:
        table.add_column(f"{layout}\nGB/s", justify="right", no_wrap=True)
        table.add_column("min-max", justify="right", no_wrap=True, style="dim")
        table.add_column("ratio", justify="right", no_wrap=True, style="bold")
    table.add_column("to", no_wrap=True)
    names = {measure: name for measure, name, _ in ROWS}
    for measure, name, ratio in ROWS:
        cells = [cell for found in report["layouts"].values() for cell in _cells(found, measure, ratio)]
        table.add_row(name, *cells, names[RATIOS[ratio][1]] if ratio else "", end_section=measure == LAST_LIMIT)
    return table


def _cells(found: Mapping[str, Any], measure: str, ratio: str) -> list[str]:
    rate = found["gb_per_s"][measure]
    return [
        f"{rate['median']:.2f}",
        f"{_short(rate['min'])}-{_short(rate['max'])}",
        f"{found['ratios'][ratio]:.3f}" if ratio else "",
    ]


def _short(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.1f}"


def _slice_table(report: Mapping[str, Any]) -> str:
    cost = report["slice_table"]
    return (
        f"slice table: {cost['table_bytes']:,} bytes a block, {100 * cost['bytes']:.2f} % of its bytes and "
        f"{100 * cost['time']:.2f} % of a put's time (no sync)"
    )


def _notes(report: Mapping[str, Any]) -> str:
    m, v = report["machine"], report["versions"]
    loops = " and ".join(sorted({found["loops"] for found in report["layouts"].values()}))
    tmpfs = "\ntmpfs is memory: its synced figures say nothing of a disk." if m["file_system"] == "tmpfs" else ""
    packages = ", ".join(f"{name} {v[name] or 'absent'}" for name in PACKAGES)
    return (
        f"Medians of {report['repeat']} rounds; ratios are taken round by round. One thread, {loops} loops; "
        f"{m['cpu']}, {m['cpu_count']} CPUs, {m['file_system'] or 'unknown file system'}.\n{packages}{tmpfs}"
    )
