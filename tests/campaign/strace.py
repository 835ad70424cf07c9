"""strace beside a servant: what its system calls were, and system calls that fail at will."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.campaign.servant import Servant

LONGEST_STRING: Final = 2**24
CALL: Final = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+|\?)(.*)")
UNFINISHED: Final = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
RESUMED: Final = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)")
HEX: Final = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?|<((?:\\x[0-9a-f]{2})+)>')


@dataclass(frozen=True)
class Call:
    """One system call that ended: its name, its arguments as strace prints them, and what it returned."""

    pid: int
    name: str
    arguments: str
    result: int
    injected: bool = False

    @property
    def descriptor(self) -> int:
        """The first argument, where that is a file descriptor."""
        return int(self.arguments[: self.arguments.index("<")])

    @property
    def paths(self) -> list[str]:
        """The paths of file descriptors in the arguments, in order."""
        return [bytes.fromhex(m[2].replace("\\x", "")).decode() for m in HEX.findall(self.arguments) if m[2]]

    @property
    def strings(self) -> list[bytes]:
        """The strings in the arguments, in order. Raises ValueError where strace cut one short."""
        found = [m for m in HEX.findall(self.arguments) if not m[2]]
        if any(cut for _, cut, _ in found):
            raise ValueError(f"{self.name}: strace cut a string short")
        return [bytes.fromhex(text.replace("\\x", "")) for text, _, _ in found]

    @property
    def numbers(self) -> list[int]:
        """The plain numbers after the last string or list, in order."""
        return [int(word) for word in re.split(r"[\]>\"]", self.arguments)[-1].split(",") if word.strip().isdigit()]


def parse(lines: Iterator[str] | Sequence[str]) -> Iterator[Call]:
    """The calls of a trace in the order in which they ended, failed ones too (result below 0)."""
    begun: dict[str, str] = {}
    for line in lines:
        if match := UNFINISHED.match(line):
            begun[match[1]] = f"{match[1]} {match[2]}({match[3]}"
            continue
        if match := RESUMED.match(line):
            line = begun.pop(match[1]) + match[3]
        if (match := CALL.match(line)) and match[4] != "?":
            yield Call(int(match[1]), match[2], match[3], int(match[4]), "(INJECTED)" in match[5])


def find_strace() -> str:
    """strace's path. Raises FileNotFoundError: without it nothing is tested, which must not look like success."""
    found = shutil.which("strace")
    if found is None:
        raise FileNotFoundError("strace is missing: install the package strace (Debian: apt-get install strace)")
    return found


@contextmanager
def attached(servant: Servant, output: Path, calls: Sequence[str], options: Sequence[str] = ()) -> Iterator[None]:
    """Trace a servant that waits for its next call, with its threads, into a file."""
    command = [find_strace(), "-f", "-y", "-o", str(output), "-e", f"trace={','.join(calls)}", *options]
    strace = subprocess.Popen([*command, "-p", str(servant.pid)], stderr=subprocess.PIPE, text=True)
    try:
        _wait_until_traced(strace)
        yield
    finally:
        if strace.poll() is None:
            strace.send_signal(signal.SIGINT)
        strace.communicate()


def _wait_until_traced(strace: subprocess.Popen[str]) -> None:
    """strace says that it is attached once it has interrupted its tracee, which then makes no call that it misses."""
    assert strace.stderr is not None
    said = strace.stderr.readline()
    if "attached" not in said or "not permitted" in said:
        raise PermissionError(f"strace cannot trace a child of this process: {said}{strace.stderr.read()}")


def record(servant: Servant, output: Path, calls: Sequence[str], arguments: Sequence[object]) -> list[Call]:
    """Everything that a servant's call does, with the bytes of all strings. Raises what `Servant.answer` raises."""
    with attached(servant, output, calls, ["-xx", "-s", str(LONGEST_STRING)]):
        servant.ask(*arguments)
    with output.open() as lines:
        return list(parse(lines))


def run_injected(
    servant: Servant, output: Path, call: str, paths: Sequence[Path], fault: str, arguments: Sequence[object]
) -> tuple[object, int]:
    """A servant's answer to a call during which a system call on some paths fails, and how often it did.

    fault: as strace's inject= takes it, such as "error=EIO:when=3". Raises what `Servant.answer` raises.
    """
    limited = [word for path in paths for word in ("-P", str(path))]
    try:
        with attached(servant, output, [call], [*limited, "-e", f"inject={call}:{fault}"]):
            answer = servant.ask(*arguments)
    finally:
        with output.open() as lines:
            hits = sum(found.injected for found in parse(lines))
    return answer, hits
