"""Replay requests against an eviction policy alone, every block of one size: what part of them would be served.

    python -m tests.policy_simulation TRACE.jsonl --capacity-blocks N --policy hazard

A trace has one request a line, {"timestamp": milliseconds, "hash_ids": [...]}, as the Mooncake traces have.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.eviction import POLICIES, policy_named
from kvstore.eviction_types import Chain, Policy

Request = tuple[float, npt.NDArray[np.uint64]]
"""When it came, in seconds, and the keys of its blocks."""


@dataclass
class Outcome:
    """What a replay counted, in blocks. served: resident, with all earlier blocks of the request."""

    references: int = 0
    served: int = 0
    blocks_written: int = 0

    @property
    def hit_ratio(self) -> float:
        return self.served / max(1, self.references)


def replay(requests: Iterable[Request], policy: Policy, capacity: int) -> Outcome:
    """Each request touches its blocks, is served its leading resident ones, and puts the others."""
    outcome, used = Outcome(), int(policy.figures()["resident"])
    for now, keys in requests:
        resident = policy.resident(keys)
        outcome.references += keys.size
        outcome.served += keys.size if resident.all() else int(resident.argmin())
        chain = Chain(keys)
        policy.request(chain, now)
        if not resident.all():
            admission = policy.admit(chain, ~resident, 1, capacity - used, now)
            policy.removed(admission.victims)
            policy.written(chain, admission.admitted, 1, now)
            written = int(admission.admitted.sum())
            used += written - admission.victims.size
            outcome.blocks_written += written
            assert used <= capacity
    return outcome


def read_trace(path: Path) -> Iterator[Request]:
    """The requests of a trace file."""
    with path.open() as lines:
        for line in lines:
            request = json.loads(line)
            yield request["timestamp"] / 1000, np.array(request["hash_ids"], np.uint64) + np.uint64(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay a trace against an eviction policy.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity-blocks", type=int, required=True)
    parser.add_argument("--policy", choices=POLICIES, default="hazard")
    arguments = parser.parse_args()
    start = time.perf_counter()
    outcome = replay(read_trace(arguments.trace), policy_named(arguments.policy), arguments.capacity_blocks)
    print(
        f"{arguments.policy} {arguments.capacity_blocks} blocks: hit_ratio {outcome.hit_ratio:.4f}, "
        f"blocks_written {outcome.blocks_written}, {time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
