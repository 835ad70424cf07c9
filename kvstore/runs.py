"""How a header packs what its layers have in common: layers of one shape whose numbers step evenly are one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

MAX_RUNS: Final = 81
"""As many as keep a header in a leaf page."""
MAX_COUNT: Final = 2**16 - 1
"""Layers of a run, and the distance of their numbers, at most."""
Ints = tuple[int, ...]


def stepped_runs(shapes: Iterable[Ints]) -> list[Ints]:
    """(first number, count, step, *shape) of each run. shapes: (*shape, layer number), sorted: equal sets of layers give
    equal runs."""
    runs: list[list[int]] = []
    for *shape, number in shapes:
        if runs and runs[-1][3:] == shape and _extends(runs[-1], number):
            runs[-1][2] = (number - runs[-1][0]) // runs[-1][1]
            runs[-1][1] += 1
        else:
            runs.append([number, 1, 0, *shape])
    return [tuple(run) for run in runs]


def _extends(run: Sequence[int], number: int) -> bool:
    first, count, step = run[:3]
    gap = number - first
    return count < MAX_COUNT and (gap <= MAX_COUNT if count == 1 else gap == step * count)
