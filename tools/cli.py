"""The `kvstore` command. Each subcommand is a function here that reads its options and prints; the work is elsewhere.

A further command is a function under `@app.command()`. It may raise any KVStoreError: that is printed in one line.
What takes long to import is imported by the command that needs it: the others, and the shell's completion, answer at once.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

import kvstore
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools import carry, look, quarantine
from kvstore.tools import drop as dropping
from kvstore.tools.commands import Reporting

if TYPE_CHECKING:
    from kvstore.tools.bench_subject import Geometry

MISUSE = 2
"""The exit status of a command that could not do what it was asked for."""


class Commands(TyperGroup):
    """A group of commands whose KVStoreErrors end in one line on stderr and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KVStoreError as error:
            command = f"{ctx.info_name or 'kvstore'} {ctx.invoked_subcommand or ''}".strip()
            typer.echo(f"error: {' '.join(str(error).split())} (see `{command} --help`)", err=True)
            raise typer.Exit(MISUSE) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore {kvstore.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A store on disk for the KV cache of serving engines: a block is given back verified, or it is a miss.

    Example: `kvstore bench`
    """


DEVICE_OPTIONS = {"device", "path", "as_json"}
"""Options of `bench` that say something on a device too."""
STEADY_OPTIONS = {"steady", "capacity_mib", "path", "seed", "as_json"}
"""Options of `bench` that say something with --steady too."""
NOT_BUSY_OPTIONS = {"steady", "capacity_mib", "device", "fsck", "store_mib"}
"""Options of `bench` that say nothing with --busy."""
FSCK_OPTIONS = {"fsck", "store_mib", "repeat", "path", "seed", "as_json"}
"""Options of `bench` that say something with --fsck too."""


@app.command()
def bench(
    context: typer.Context,
    blocks: Annotated[int, typer.Option(min=1, help="How many blocks are put and got.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each a tensor of its own.")] = 32,
    heads: Annotated[int, typer.Option(min=1, help="KV heads of each layer.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    head_size: Annotated[int, typer.Option(min=1, help="Channels of K, and of V, of one head.")] = 128,
    dtype: Annotated[str, typer.Option(help="Element type of the cache.")] = "bfloat16",
    layouts: Annotated[
        str, typer.Option(help="Layouts to measure, separated by commas; the first one's are the `ratios`.")
    ] = "BHNC,2BNHD",
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 9,
    path: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which a temporary one is made and removed; by default $TMPDIR, or the current one."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bytes and of the order of block ids.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    steady: Annotated[
        bool, typer.Option("--steady", help="Measure a store that has been full for long, and cold reads, instead.")
    ] = False,
    busy: Annotated[
        bool, typer.Option("--busy", help="Measure beside a thread of pure Python that never rests, instead.")
    ] = False,
    capacity_mib: Annotated[int, typer.Option(min=64, help="With --steady: the store's capacity in MiB.")] = 512,
    fsck: Annotated[
        bool, typer.Option("--fsck", help="Measure kvstore-fsck beside `cat` of the same file, instead.")
    ] = False,
    store_mib: Annotated[int, typer.Option(min=2, help="With --fsck: MiB of blocks in a store.")] = 4096,
    device: Annotated[
        str, typer.Option(help="`cpu`, or a CUDA device (`cuda`, `cuda:1`): its kernels are proved, then measured.")
    ] = "cpu",
) -> None:
    """Measure put and get against this machine's limits: memcpy, pwrite, pread, fdatasync and np.sum of as many bytes.

    GB/s are 10^9 bytes a second. The default geometry needs 1.5 GB of memory (2 GB with page cache) and, while
    it runs, 0.8 GB of disk. On some machines /tmp is a tmpfs, which lies in memory: give a
    `--path` on the disk that the store will be on.

    Examples:

    - `kvstore bench`
    - `kvstore bench --path /var/lib/kvstore --repeat 21 --json > bench.json`
    - `kvstore bench --layers 48 --heads 4 --tokens 32 --dtype float16 --layouts B2NHD`
    - `kvstore bench --steady --path /var/lib/kvstore`
    - `kvstore bench --busy --path /var/lib/kvstore`
    - `kvstore bench --fsck --path /var/lib/kvstore`
    - `kvstore bench --device cuda`

    With `--steady` ten times `--capacity-mib` are written, with the oldest blocks going first and with random victims. It
    takes `--path`, `--seed` and `--json` besides, and 2.5 times the capacity of disk.

    With `--busy` gets, puts and matches run in a second thread, beside a busy main thread and beside a resting one, with
    an I/O process and without. It takes the other options, the first of `--layouts` alone, and 256 blocks unless
    `--blocks` are given: 3.3 GB of memory and 2.2 GB of disk.

    With `--fsck` stores of 2 MiB, 64 KiB and 4 KiB records are checked by whole commands, from the page cache. It takes
    `--store-mib`, `--repeat`, `--path`, `--seed` and `--json` besides, and 1.6 times `--store-mib`, 2 GB at
    least, of memory and of disk.

    On a device (docs/gpu.md) it measures geometries and sizes of its own, takes `--path` and `--json` of the other options,
    and without `--json` writes bench_gpu.json to the current folder besides the table.
    """
    if device != "cpu":
        raise typer.Exit(_bench_device(context, device, path, as_json))
    from kvstore.tools import bench as benchmark
    from kvstore.tools import bench_busy
    from kvstore.tools.bench_report import render
    from kvstore.tools.bench_subject import Geometry

    if steady:
        _check_options(context, STEADY_OPTIONS, "--steady: the steady state has geometries of its own")
        return _bench_steady(path, capacity_mib, seed, as_json)
    if fsck:
        _check_options(context, FSCK_OPTIONS, "--fsck: the check has geometries of its own")
        return _bench_fsck(path, store_mib, repeat, seed, as_json)
    words = [word.strip() for word in layouts.split(",") if word.strip()] or [""]
    if busy:
        _check_options(
            context, set(context.params) - NOT_BUSY_OPTIONS, "--busy: its stores have a capacity of their own"
        )
        count = blocks if "blocks" in _given(context) else bench_busy.BLOCKS
        geometry = Geometry(count, layers, heads, tokens, head_size, dtype, seed)
        return _bench_busy(geometry, words[0], repeat, path, as_json)
    geometry = Geometry(blocks, layers, heads, tokens, head_size, dtype, seed)
    with _ticks(benchmark.num_steps(words, repeat), as_json) as tick:
        report = benchmark.run(geometry, words, repeat, path, tick)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(render(report))


@contextmanager
def _ticks(total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr, which each call with a description moves on. It has no thread of its own."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = quiet or not console.is_terminal
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=disable) as progress:
        task = progress.add_task("", total=total)
        yield lambda what: progress.update(task, advance=1, description=what, refresh=True)


def _given(context: typer.Context) -> set[str]:
    """The options that were given."""
    return {name for name in context.params if (s := context.get_parameter_source(name)) and s.name == "COMMANDLINE"}


def _check_options(context: typer.Context, allowed: set[str], reason: str) -> None:
    """Raise ConfigError for options that were given and say nothing here."""
    if others := sorted(f"--{name.replace('_', '-')}" for name in _given(context) - allowed):
        raise ConfigError(f"{', '.join(others)} with {reason}, leave it out")


def _bench_steady(path: Path | None, capacity_mib: int, seed: int, as_json: bool) -> None:
    from kvstore.tools import bench_steady
    from kvstore.tools.bench_limits import base_folder
    from kvstore.tools.bench_subject import MIB, BenchError

    base = base_folder(path, BenchError)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=base) as folder,
        _ticks(bench_steady.num_steps(), as_json) as tick,
    ):
        report = bench_steady.run(Path(folder), capacity_mib * MIB, seed, tick)
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(bench_steady.lines(report)))


def _bench_busy(geometry: Geometry, layout: str, repeat: int, path: Path | None, as_json: bool) -> None:
    from kvstore.tools import bench_busy

    with _ticks(bench_busy.num_steps(repeat), as_json) as tick:
        report = bench_busy.run(geometry, layout, repeat, path, tick)
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(bench_busy.lines(report)))


def _bench_fsck(path: Path | None, store_mib: int, repeat: int, seed: int, as_json: bool) -> None:
    from kvstore.tools import bench_fsck
    from kvstore.tools.bench_subject import MIB

    with _ticks(bench_fsck.num_steps(repeat), as_json) as tick:
        report = bench_fsck.run(store_mib * MIB, repeat, path, seed, tick)
    typer.echo(json.dumps(report, indent=2) if as_json else "\n".join(bench_fsck.lines(report)))


def _bench_device(context: typer.Context, device: str, path: Path | None, as_json: bool) -> int:
    """The GPU benchmark's exit status. Raises ConfigError for options that only the CPU's has."""
    _check_options(context, DEVICE_OPTIONS, f"--device {device}: the GPU benchmark has geometries and sizes of its own")
    if not device.startswith("cuda"):
        raise ConfigError(f"--device {device}: expected cpu, cuda, or a CUDA device such as cuda:1")
    from kvstore.tools import bench_gpu

    options = [*(["--path", str(path)] if path else []), *(["--json", "-"] if as_json else [])]
    return bench_gpu.main(["--device", device, *options])


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A file of JSON lines with `timestamp` and `hash_ids`.")],
    capacity_blocks: Annotated[int, typer.Option(help="How many blocks the store has room for.")],
    policy: Annotated[str, typer.Option(help="What goes where a new block needs room: `hazard` or `lru`.")] = "hazard",
    path: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which a temporary one is made and removed; by default $TMPDIR, or the current one."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Replay a trace of requests against a store, to see what a capacity and a policy would serve.

    A line of the trace is a request: `{"timestamp": milliseconds, "hash_ids": [...]}`, the ids of its blocks from the
    first on; other fields are left out. Every block is a small one of 24 KiB; what the store says it has is loaded,
    verified and compared. The trace's time is the store's clock. `hit_ratio` is the share of all blocks asked for
    that were served as a request's leading ones.

    Examples:

    - `kvstore replay conversation_trace.jsonl --capacity-blocks 18279`
    - `kvstore replay conversation_trace.jsonl --capacity-blocks 18279 --policy lru --json`
    """
    from kvstore.tools import replay as replaying

    requests = replaying.read_trace(trace)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = as_json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=len(requests))
        report = replaying.run(requests, capacity_blocks, policy, path, lambda: progress.advance(task))
    typer.echo(json.dumps(report, indent=2) if as_json else replaying.render(report))


@app.command()
def drop(
    store: Annotated[Path, typer.Argument(help="The folder of a store, or of one of its shards.")],
    identity: Annotated[
        str | None, typer.Option(help="The identity id's first hexadecimal digits; without it they are listed.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all blocks of one identity (a model, a revision, ...); without `--identity`, list what the store holds.

    Deleting needs the store to itself: stop the engine that writes it. The file keeps its size; its room is used again.

    Examples:

    - `kvstore drop /var/lib/kvstore`
    - `kvstore drop /var/lib/kvstore --identity 3f2a91 --yes`
    """
    with dropping.opened(store, writable=identity is not None) as shards:
        found = dropping.held(shards)
        if identity is None:
            typer.echo("\n".join(map(str, found.values())) or f"{store} holds no identity")
            return
        one = dropping.the_one(found, identity, store)
        if not yes:
            where = f"{len(shards)} shards" if len(shards) > 1 else str(shards[0].folder)
            typer.confirm(f"{one}\nDelete all of it from {where}?", abort=True)
        typer.echo(f"{dropping.drop(shards, one.identity_id):,} records deleted")


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def fsck(context: typer.Context) -> None:
    """Check a store's files, say what is damaged, and repair it: the same as `kvstore-fsck`, with the same options."""
    from kvstore.tools import fsck as checking

    raise typer.Exit(checking.main(context.args))


LOOKING: dict[str, Callable[..., None]] = {
    "stat": look.stat,
    "ls": look.ls,
    "show": look.show,
    "verify": look.verify,
    "export": carry.export_records,
    "import": carry.import_records,
}
for name, command in LOOKING.items():
    app.command(name, cls=Reporting)(command)
app.add_typer(quarantine.app, name="quarantine")


if __name__ == "__main__":
    app()
