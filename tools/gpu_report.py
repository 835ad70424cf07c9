"""What the GPU benchmark says: its JSON, its targets and a short table."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MIB = 2**20
LARGE_BYTES: Final = 250 * MIB
"""Calls from 256 MiB on; a call is a whole number of blocks, so that it may be a little less."""
COLUMNS: Final = (
    *("copy", "reduce", "checksum", "verify", "slices", "gather", "scatter"),
    *("host_to_device", "device_to_host", "load"),
)
STEPS: Final = (("gather", "start a put's"), ("put", "put"), ("get", "get"), ("verify", "verify"))


@dataclass(frozen=True)
class Target:
    """What the benchmark holds the kernels to: a figure of at least, or below, a bound. figures: all that were measured,
    of which the worst counts."""

    name: str
    bound: float
    at_least: bool
    figures: Callable[[dict[str, Any]], Iterator[float]]

    def judge(self, report: dict[str, Any]) -> dict[str, Any]:
        """Found and met; None where nothing was measured."""
        found = list(self.figures(report))
        if not found:
            return {"target": self.name, "bound": self.bound, "found": None, "met": None}
        worst = min(found) if self.at_least else max(found)
        met = worst >= self.bound if self.at_least else worst < self.bound
        return {"target": self.name, "bound": self.bound, "found": worst, "met": met}


def _sizes(report: dict[str, Any], least: int = 0) -> Iterator[dict[str, Any]]:
    for found in report.get("kernels", {}).values():
        yield from (size for size in found.values() if size["bytes"] >= least)


def _of_copy(name: str) -> Callable[[dict[str, Any]], Iterator[float]]:
    return lambda report: (s["operations"][name]["of_copy"] for s in _sizes(report, LARGE_BYTES))


def _host_cost(report: dict[str, Any]) -> Iterator[float]:
    found = report.get("host_cost", {})
    yield from [found["of_allowed"]] if "of_allowed" in found else []


TARGETS: Final = (
    Target("checksum, share of a copy's bandwidth from 256 MiB", 0.85, True, _of_copy("checksum")),
    Target("verify, share of a copy's bandwidth from 256 MiB", 0.85, True, _of_copy("verify")),
    Target("checksum, times the torch formulation", 5, True, lambda r: (s["times_torch"] for s in _sizes(r))),
    Target(
        *("verify, share of a load over the bus from 256 MiB", 0.02, False),
        lambda r: (s["verify_of_load"] for s in _sizes(r, LARGE_BYTES)),
    ),
    Target("host cost of a batch, share of 200 us + 1 us a block", 1, False, _host_cost),
)


@dataclass
class Report:
    """The figures so far, written to `path` at each `save`; None: nowhere."""

    path: Path | None
    found: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Judge, and write the file anew as a whole."""
        self.found["targets"] = [target.judge(self.found) for target in TARGETS]
        if self.path is not None:
            new = self.path.with_name(f"{self.path.name}.new")
            new.write_text(self.text() + "\n")
            os.replace(new, self.path)

    def text(self) -> str:
        """The JSON."""
        return json.dumps(self.found, indent=2)


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    parts = [_head(report), _kernels(report), _end_to_end(report)]
    parts += [_host(report, "host_cost", "launches and copies stubbed out"), _host(report, "device_cost", "all of it")]
    parts += [_errors(report), _targets(report)]
    return "\n\n".join(part for part in parts if part)


def _head(report: dict[str, Any]) -> str:
    device, proved = report.get("device", {}), report.get("correctness", {})
    names = ", ".join(f"{k} {device[k]}" for k in ("cuda", "torch", "triton", "numpy", "cpus") if device.get(k))
    proof = f"{len(proved)} forms of caches are the reference's, bit for bit" if proved else ""
    return "\n".join(line for line in (f"{device['name']}: {names}" if device else "", proof) if line)


def _kernels(report: dict[str, Any]) -> str:
    """GB/s of the device's memory, over the bus of blocks; in brackets the share of the copy's."""
    rows = [["", "MiB", *COLUMNS, "x torch", "verify/load"]]
    for name, sizes in report.get("kernels", {}).items():
        for size in sizes.values():
            cells = [_cell(size["operations"][column]) for column in COLUMNS]
            last = [f"{size['times_torch']:.1f}", f"{size['verify_of_load']:.2%}"]
            rows.append([name, f"{size['bytes'] / MIB:.0f}", *cells, *last])
    title = "GB/s through the device's memory (share of the copy's); over the bus GB/s of blocks"
    return f"{title}\n{grid(rows)}" if len(rows) > 1 else ""


def _cell(found: dict[str, Any]) -> str:
    if "of_copy" not in found:
        return f"{found['gb_per_s']:.1f}"
    return f"{found['memory_gb_per_s']:.0f} ({found['of_copy']:.2f})"


def _end_to_end(report: dict[str, Any]) -> str:
    rows = [["end to end, GB/s of blocks", "put", "get"]]
    for name, found in report.get("end_to_end", {}).items():
        if isinstance(found, dict) and "put" in found:
            rows.append([name.replace("_", " "), *(f"{found[k]['gb_per_s']:.2f}" for k in ("put", "get"))])
        elif isinstance(found, str):
            rows.append([name.replace("_", " "), found])
    return grid(rows) if len(rows) > 1 else ""


def _host(report: dict[str, Any], name: str, what: str) -> str:
    found = report.get(name)
    if not found:
        return ""
    sizes = list(next(iter(found["microseconds"].values())))
    rows = [["blocks a batch", *sizes, "us a batch", "us a block"]]
    for step, words in STEPS:
        by, line = found["microseconds"][step], found["fit"][step]
        rows.append([words, *(f"{by[n]:.0f}" for n in sizes), f"{line['batch']:.0f}", f"{line['block']:.3f}"])
    return f"host's microseconds a batch, {what}; the last two: a line through them\n{grid(rows)}"


def _errors(report: dict[str, Any]) -> str:
    lines = [f"{phase}: {' '.join(why.split())[-300:]}" for phase, why in report.get("errors", {}).items()]
    lines += [f"left out: {what}" for what in report.get("left_out", [])]
    return "\n".join(lines)


def _targets(report: dict[str, Any]) -> str:
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = [["target", "bound", "found", ""]]
    for judged in report.get("targets", []):
        if judged["met"] is None and "device" not in report:
            continue
        found = "" if judged["found"] is None else f"{judged['found']:.3g}"
        rows.append([judged["target"], f"{judged['bound']:g}", found, words[judged["met"]]])
    return grid(rows)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first column to the left and the others to the right. A row shorter than the first ends in words,
    which need not fit a column of figures."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    first = max(len(row[0]) for row in rows)
    widths = [max(len(row[i]) for row in whole) for i in range(1, len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) for c, w in zip(row[1:], widths, strict=False)] if row in whole else row[1:]
        lines.append("  ".join([row[0].ljust(first), *cells]).rstrip())
    return "\n".join(lines)
