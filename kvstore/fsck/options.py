"""What a check looks at, how closely, and for how long."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.errors import ConfigError

STAGES: Final = ("quick", "default", "deep")
"""Each does what the ones before it do."""
DEVICES: Final = ("cpu", "cuda")
MAX_JOBS: Final = 64
MAX_PREFIX_BYTES: Final = 82
"""Of the longest index key."""
UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
NUMBER: Final = r"\d{1,15}(?:\.\d{1,9})?"


@dataclass(frozen=True)
class Sample:
    """A part of the records: a share of them (above 0, at most 1), or so many stored bytes. One of the two is None. Raises
    ConfigError."""

    share: float | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.share, self.nbytes) if value is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf or (self.share or 0) > 1:
            raise ConfigError(f"{self}: expected a share above 0 and up to 1, or a number of bytes")


def parse_sample(text: str) -> Sample:
    """A sample as it is typed: `5%`, `1/7`, or bytes with K, M, G, T (2**10 each): `20G`. Raises ConfigError."""
    if found := re.fullmatch(rf"({NUMBER})%", text, re.ASCII):
        return Sample(share=float(found[1]) / 100)
    if found := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII):
        return Sample(share=int(found[1]) / int(found[2]) if int(found[2]) else 0)
    if found := re.fullmatch(rf"({NUMBER})([KMGTP]?)(?:i?B)?", text, re.ASCII | re.IGNORECASE):
        return Sample(nbytes=int(float(found[1]) * UNITS[found[2].upper()]))
    raise ConfigError(f"{text!r} is no sample: expected a share such as 5% or 1/7, or bytes such as 20G")


@dataclass(frozen=True)
class Options:
    """stage: one of STAGES; sample: None for all records; prefix: of index keys or of block hashes, empty for all;
    max_duration_s: None for no bound; resume: go on where a checkpoint says, the least recently checked first; jobs:
    scanning processes; rate_limit: stored bytes a second that they read, all together; device: where deep sums are taken.
    Raises ConfigError."""

    stage: str = "default"
    sample: Sample | None = None
    prefix: bytes = b""
    max_duration_s: float | None = None
    resume: bool = False
    jobs: int = 1
    rate_limit: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.stage not in STAGES or self.device not in DEVICES:
            raise ConfigError(f"stage {self.stage!r}, device {self.device!r}: expected one of {STAGES}, of {DEVICES}")
        if not 1 <= self.jobs <= MAX_JOBS or len(self.prefix) > MAX_PREFIX_BYTES:
            given = f"jobs {self.jobs}, a prefix of {len(self.prefix)} bytes"
            raise ConfigError(f"{given}: expected 1 to {MAX_JOBS}, and {MAX_PREFIX_BYTES} at most")
        for name in ("max_duration_s", "rate_limit"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}: expected a number above 0")


class Range(NamedTuple):
    """Index keys from start on, below end, which is empty where there is none; how many records and stored bytes."""

    start: bytes
    end: bytes
    records: int
    nbytes: int
