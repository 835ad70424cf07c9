"""The `kvstore` command. Each subcommand is a function here that reads its options and prints; the work is elsewhere.

A further command is a function under `@app.command()`. It may raise any KVStoreError: that is printed in one line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

import kvstore
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tools import bench as benchmark
from kvstore.tools import bench_gpu
from kvstore.tools.bench_report import render
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
    add_completion=False,
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
    - `kvstore bench --device cuda`

    On a device (docs/gpu.md) it measures geometries and sizes of its own, takes `--path` and `--json` of the other options,
    and without `--json` writes bench_gpu.json to the current folder besides the table.
    """
    if device != "cpu":
        raise typer.Exit(_bench_device(context, device, path, as_json))
    geometry = Geometry(blocks, layers, heads, tokens, head_size, dtype, seed)
    words = [word.strip() for word in layouts.split(",") if word.strip()] or [""]
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    quiet = as_json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=benchmark.num_steps(words, repeat))
        report = benchmark.run(
            geometry, words, repeat, path, lambda what: progress.update(task, advance=1, description=what)
        )
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(render(report))


def _bench_device(context: typer.Context, device: str, path: Path | None, as_json: bool) -> int:
    """The GPU benchmark's exit status. Raises ConfigError for options that only the CPU's has."""
    given = {name for name in context.params if (s := context.get_parameter_source(name)) and s.name == "COMMANDLINE"}
    if others := sorted(f"--{name.replace('_', '-')}" for name in given - DEVICE_OPTIONS):
        raise ConfigError(
            f"{', '.join(others)} with --device {device}: the GPU benchmark has geometries and sizes of its own, leave it out"
        )
    if not device.startswith("cuda"):
        raise ConfigError(f"--device {device}: expected cpu, cuda, or a CUDA device such as cuda:1")
    options = [*(["--path", str(path)] if path else []), *(["--json", "-"] if as_json else [])]
    return bench_gpu.main(["--device", device, *options])


if __name__ == "__main__":
    app()
