"""The demo's second process: it knows the prompt and the store, and has computed nothing.

`python -m kvstore.tools.demo_second FOLDER` reads FOLDER/task.json, loads the prefix, goes on, and leaves
FOLDER/second.json and FOLDER/second.npy: the figures, and the logits as int16 bits.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from kvstore.engines.transformers import load_cache, open_store
from kvstore.tools.demo_model import as_bits, forward, go_on, prefill
from kvstore.tools.model import load_smollm2

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """What the first process hands over. threads: torch's, on which the last bits of a logit depend."""

    model: str
    store: str
    ids: list[int]
    threads: int


@dataclass(frozen=True)
class Figures:
    """tokens: the prefix that was loaded. stats: what the store counted. Seconds until the first new token: load is the
    loading of that prefix with every check, rest the forward pass after it, full the same prompt with nothing loaded."""

    tokens: int
    answer: list[int]
    stats: dict[str, int]
    load: float
    rest: float
    full: float


def main(folder: Path) -> None:
    """Do the task of the folder; exceptions end the process."""
    task = Task(**json.loads((folder / "task.json").read_text()))
    torch.set_num_threads(task.threads)
    _, model = load_smollm2(Path(task.model))
    ids = torch.tensor([task.ids])
    with open_store(task.store, model, mode="r") as store:
        (cache, tokens), load = _timed(lambda: load_cache(store, ids))
        stats = store.stats()
        again, _ = load_cache(store, ids)
    said = go_on(model, ids, cache)
    _, rest = _timed(lambda: forward(model, ids[:, tokens:], again, 1))
    _, full = _timed(lambda: prefill(model, ids))
    np.save(folder / "second.npy", as_bits(said.logits).numpy())
    (folder / "second.json").write_text(json.dumps(asdict(Figures(tokens, said.answer, stats, load, rest, full))))


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returned, and its seconds."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]))
