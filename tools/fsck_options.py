"""The options of kvstore-fsck as they are typed: taken apart, and refused where they contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kvstore.errors import ConfigError

SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_SECONDS: Final = 366 * 86400
MAX_PREFIX_DIGITS: Final = 2 * 82
"""Of the longest index key."""
CONFLICTS: Final = {
    "quick": ("deep", "sample", "prefix", "resume", "rate_limit"),
    "repair": ("sample", "prefix", "max_duration", "resume", "salvage"),
    "dry_run": ("sample", "prefix", "max_duration", "resume", "salvage", "yes"),
    "salvage": ("quick", "deep", "sample", "prefix", "max_duration", "resume", "compact", "yes", "report", "device"),
    "sample": ("prefix",),
}
"""What says nothing, or the contrary, beside an option."""
REASONS: Final = {
    "quick": "a quick check reads no records",
    "repair": "a repair goes by a check of the whole store",
    "dry_run": "it prints the plan of a repair, which goes by a check of the whole store, and changes nothing",
    "salvage": "salvage looks at every byte of the file, and copies what is intact",
    "sample": "give one of them",
}
NEEDS: Final = {
    "compact": ("repair", "dry_run"),
    "yes": ("repair",),
    "output": ("salvage",),
    "salvage": ("output",),
    "device": ("deep",),
}
"""What an option needs one of beside it."""


def option(name: str) -> str:
    """The option as it is typed."""
    return f"--{name.replace('_', '-')}"


def check_together(given: Iterable[str]) -> None:
    """Raise ConfigError where options that were given contradict each other, or say nothing without another."""
    given = set(given)
    for name, others in CONFLICTS.items():
        if name in given and (wrong := [other for other in others if other in given]):
            raise ConfigError(f"{option(name)} and {', '.join(map(option, wrong))}: {REASONS[name]}")
    for name, needed in NEEDS.items():
        if name in given and not given & set(needed):
            raise ConfigError(f"{option(name)} says nothing by itself: add {' or '.join(map(option, needed))}")


def seconds(text: str) -> float:
    """A duration in seconds: `90`, `90s`, `10m`, `1.5h`, `1d`. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)", text.strip(), re.ASCII)
    value = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if not 0 < value <= MAX_SECONDS:
        raise ConfigError(f"{text!r} is no duration: expected seconds, or a number with s, m, h or d, such as 10m")
    return value


def prefix(text: str) -> bytes:
    """The first bytes of a block hash or index key, from hexadecimal digits. Raises ConfigError."""
    digits = text.strip().lower()
    if not re.fullmatch(f"([0-9a-f]{{2}}){{1,{MAX_PREFIX_DIGITS // 2}}}", digits):
        raise ConfigError(
            f"{text!r} is no prefix: expected an even number of hexadecimal digits, {MAX_PREFIX_DIGITS} at most"
        )
    return bytes.fromhex(digits)


def rate(megabytes: float) -> int:
    """Bytes a second, from MB/s (10^6 bytes). Raises ConfigError."""
    if not 0.001 <= megabytes <= 1e9:
        raise ConfigError(f"{megabytes:g} MB/s is no rate to read at: expected 0.001 or more")
    return round(megabytes * 1e6)
