"""The `kvstore-fsck` command: reads its options, has a store checked, prints what was found, repairs where it is told to.

What reads and shows a store takes longer to import than the options take to read: it is imported in functions, once the
scanning processes have been started, and a report or a repair where one is wanted.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import kvstore
from kvstore.errors import ConfigError, KVStoreError
from kvstore.fsck.findings import Finding, Progress
from kvstore.fsck.options import Options, parse_sample
from kvstore.fsck.team import ready
from kvstore.tools import fsck_options
from kvstore.tools.fsck_json import finding_line, summary_line
from kvstore.tools.fsck_outcome import CANCELLED, CLEAN, DAMAGE, FAILED, USAGE, Run, one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

STATUSES: Final[dict[object, int]] = {2: USAGE, 130: CANCELLED}
"""Exit statuses of typer, for misuse and Ctrl-C: this command's are a sum in which there is no 2."""
PLAIN_WIDTH: Final = 100
"""Of a table that goes to no terminal."""
YES: Final = "yes"
FIRST_JOBS: Final = 2
"""Processes that have something to do as soon as a check begins: the trees, the index."""

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_show_locals=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with ready(_first_jobs(given)):
            app(given, prog_name="kvstore-fsck")
    except SystemExit as end:
        return STATUSES.get(end.code, int(end.code or CLEAN))
    except KeyboardInterrupt:
        return CANCELLED
    except Exception:
        # Python's own status would be 1, which says that all was repaired.
        traceback.print_exc()
        return FAILED
    return CLEAN


def _first_jobs(given: Sequence[str]) -> int:
    """How many processes a check will most likely need at once; they start while the options are read. A guess: those that
    are too many are ended, and those that lack are started later."""
    if not given or not {"--help", "--version", "--salvage"}.isdisjoint(given):
        return 0
    text = " ".join(given)
    return FIRST_JOBS if "--jobs" in text and not re.search(r"--jobs[ =]1\b", text) else 1


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstore-fsck {kvstore.__version__}")
        raise typer.Exit


@app.command()
def fsck(
    context: typer.Context,
    store: Annotated[Path, typer.Argument(help="The folder of a store, or of one of its shards.", readable=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Files, trees, format and accounting alone.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Decode every record too, and sum what comes out.")] = False,
    device: Annotated[str, typer.Option(help="With --deep: where records are summed, `cpu` or `cuda`.")] = "cpu",
    sample: Annotated[str | None, typer.Option(help="A part of the records: `5%`, `1/7` or `20G`.")] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Records whose block hash or index key begins so (hexadecimal).")
    ] = None,
    max_duration: Annotated[
        str | None, typer.Option(help="End after so long, with a checkpoint: seconds, or `10m`, `2h`.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint; the least recently checked first.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes that read and hash.")] = 1,
    rate_limit: Annotated[
        float | None, typer.Option(metavar="MB/S", help="Read at most so many MB (10^6 bytes) a second.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A line for each finding, then one for the whole.")] = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a report: one page, for a browser.")
    ] = None,
    repairs: Annotated[bool, typer.Option("--repair", help="Repair what is found, after a typed yes.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what --repair would do, and change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --repair: do not ask.")] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="With --repair: return free space to the file system.")
    ] = False,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Copy what is intact to --output; the store is not touched.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="NEW", help="With --salvage: the folder to be made.")] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Check a store's files, say what is damaged and what that means, and repair it when told to.

    Without `--repair` it changes nothing, and works beside a running engine; checks that need the store to itself are then
    named as not made. Whatever is in the files, it ends with an answer.

    **What is checked**, and what is not:

    - `--quick`: the STORE file, the file's length against its meta pages, LMDB's trees and free list, counts and bytes.
      **Does not see** a changed byte in a record: it reads none.
    - default: and each record's header, key, slice table and storage hashes. **Does not see** bytes that were wrong before
      they were hashed (a codec or memory at fault while storing).
    - `--deep`: and decodes each record and sums what comes out. **Does not see** KV that was wrong when the engine handed
      it over, changes that keep the checksum (docs/checksum.md), or a forger: no hash here is cryptographic.

    `--sample`, `--prefix` and `--max-duration` say nothing about the records that they leave out. A check is of the moment:
    a disk that fails tomorrow is found tomorrow.

    **Exit status**, a sum: 0 clean, 1 repaired, 4 damage left, 8 could not be checked (or written by a newer kvstore),
    16 usage, 32 cancelled, or out of time, with a checkpoint (`--resume` goes on).

    Examples:

    - `kvstore-fsck /var/lib/kvstore`
    - `kvstore-fsck --deep --jobs 2 --report report.html /var/lib/kvstore`
    - `kvstore-fsck --max-duration 10m --resume --rate-limit 200 --json /var/lib/kvstore` (from cron)
    - `kvstore-fsck --dry-run /var/lib/kvstore`, then `kvstore-fsck --repair /var/lib/kvstore`
    - `kvstore-fsck --salvage --output /var/lib/kvstore-new /var/lib/kvstore`
    """
    given = _given(context)
    _usage(lambda: fsck_options.check_together(given))
    if "repair" in given and not yes and not dry_run and not _terminal():
        raise typer.BadParameter("--repair asks before it changes anything, and nobody is there to answer: add --yes")
    ask = Ask("repair" in given and not dry_run, dry_run, yes, compact, as_json, report)
    try:
        folders = shards_of(store)
        if report is not None:
            _check_report(report)
        if output is not None:
            raise typer.Exit(_salvage(store, folders, output))
        options = _usage(lambda: _options(quick, deep, device, sample, prefix, max_duration, resume, jobs, rate_limit))
        run = Run(store, options.stage, time.time(), _scope(sample, prefix), _again(quick, deep))
        run.again = _going_on(quick, sample, prefix, jobs, rate_limit)
        raise typer.Exit(_run(run, folders, options, ask))
    except (KVStoreError, OSError) as error:
        _fail(one_line(error))
        raise typer.Exit(FAILED) from None


@dataclass(frozen=True)
class Ask:
    """What is wanted of a run besides a check."""

    repair: bool
    dry_run: bool
    yes: bool
    compact: bool
    as_json: bool
    report: Path | None


def shards_of(store: Path) -> list[Path]:
    """The shards of a store. Raises StorePathError where there is none."""
    from kvstore.fsck.shards import shards

    return shards(store)


def _given(context: typer.Context) -> set[str]:
    """The options that were given, by the names that they are typed with."""
    names = {"repairs": "repair", "as_json": "json"}
    source = {name: context.get_parameter_source(name) for name in context.params}
    return {names.get(name, name) for name, origin in source.items() if origin and origin.name == "COMMANDLINE"}


def _usage(make: Callable[[], Any]) -> Any:
    """What is made, with ConfigError as misuse."""
    try:
        return make()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _options(
    quick: bool,
    deep: bool,
    device: str,
    sample: str | None,
    prefix: str | None,
    max_duration: str | None,
    resume: bool,
    jobs: int,
    rate_limit: float | None,
) -> Options:
    return Options(
        stage="quick" if quick else "deep" if deep else "default",
        sample=None if sample is None else parse_sample(sample),
        prefix=b"" if prefix is None else fsck_options.prefix(prefix),
        max_duration_s=None if max_duration is None else fsck_options.seconds(max_duration),
        resume=resume,
        jobs=jobs,
        rate_limit=None if rate_limit is None else fsck_options.rate(rate_limit),
        device=device,
    )


def _scope(sample: str | None, prefix: str | None) -> str:
    """The part that is looked at, in words."""
    return f"a sample, {sample}," if sample else f"records under {prefix}" if prefix else ""


def _again(quick: bool, deep: bool) -> tuple[str, ...]:
    """What a repair needs to find the same again."""
    return ("--quick",) if quick else ("--deep",) if deep else ()


def _going_on(
    quick: bool, sample: str | None, prefix: str | None, jobs: int, rate_limit: float | None
) -> tuple[str, ...]:
    """What the same check needs, besides its stage, to go on where it ended: a quick one has no checkpoint."""
    said = [] if quick else ["--resume"]
    said += ["--sample", sample] if sample else ["--prefix", prefix] if prefix else []
    said += ["--jobs", str(jobs)] * (jobs > 1)
    return (*said, *(["--rate-limit", f"{rate_limit:g}"] if rate_limit else []))


def _terminal() -> bool:
    """Whether a person can answer."""
    return sys.stdin.isatty()


def _fail(said: str) -> None:
    typer.echo(f"error: {printable(said)} (see `kvstore-fsck --help`)", err=True)


def _check_report(path: Path) -> None:
    """Raise OSError where the report cannot be written, before a long check and not behind it."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise OSError(f"--report {path}: expected a file in a folder that can be written")


# --- a run -----------------------------------------------------------------------------------------------------------


class Told:
    """Passes on what a check finds: to stdout as lines of JSON, to the bar how far it is."""

    def __init__(self, as_json: bool, bar: Callable[[Path, Progress], None]) -> None:
        self.as_json, self.progress, self.after_repair = as_json, bar, False

    def found(self, shard: Path, finding: Finding) -> None:
        if self.as_json:
            print(finding_line(shard, finding, self.after_repair), flush=True)


def _run(run: Run, folders: Sequence[Path], options: Options, ask: Ask) -> int:
    """Check, repair where that is wanted, and print; the exit status."""
    from kvstore.tools.fsck_run import check_shards, oldest_first, progress_bar

    with progress_bar() as bar:
        told = Told(ask.as_json, bar)
        check_shards(run, oldest_first(folders) if options.resume else folders, options, told)
    planned: list[tuple[Path, list[str]]] = []
    changed = True
    if (ask.repair or ask.dry_run) and not run.interrupted:
        planned, changed = _repair(run, options, ask)
    for checked in run.shards:
        if checked.error:
            _fail(checked.error)
    if ask.as_json:
        print(summary_line(run, planned), flush=True)
    else:
        _show(run, changed)
    if ask.report is not None:
        from kvstore.tools.fsck_html import write_report

        write_report(run, ask.report)
        typer.echo(f"report: {ask.report}", err=True)
    return run.status


def _show(run: Run, changed: bool) -> None:
    """Print what a run came to. changed: whether what was found has not been shown yet."""
    from kvstore.tools.fsck_text import show, show_advice

    (show if changed else show_advice)(run, _console())


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def _repair(run: Run, options: Options, ask: Ask) -> tuple[list[tuple[Path, list[str]]], bool]:
    """The plans in words, and whether they were carried out, which has to be wanted and confirmed. What was found is shown
    before."""
    from kvstore.tools.fsck_repairing import does_nothing, plan_words, plans, repair
    from kvstore.tools.fsck_run import check_again, progress_bar, terminable
    from kvstore.tools.fsck_text import show_found

    made = plans(run)
    worded = [(checked.shard, plan_words(todo, ask.compact)) for checked, todo in made]
    if not ask.as_json or not (ask.yes or ask.dry_run):
        show_found(run, _console(stderr=ask.as_json))
    _say_plans(run, worded, ask)
    idle = all(does_nothing(todo, ask.compact) for _, todo in made)
    if ask.dry_run or idle or not (ask.yes or _confirmed()):
        return worded, False
    try:
        with terminable(), progress_bar() as bar:
            told = Told(ask.as_json, bar)
            told.after_repair = True
            check_again(run, repair(made, options, ask.compact, bar), options, told)
    except KeyboardInterrupt:
        run.interrupted = True
        _fail("cancelled in a repair: each shard is the old one or the new one; repair again")
    return worded, True


def _say_plans(run: Run, worded: Sequence[tuple[Path, list[str]]], ask: Ask) -> None:
    """Print the plans; to stderr where stdout is for JSON."""
    for shard, words in worded:
        name = f" of {printable(shard.name)}" if len(run.shards) > 1 else ""
        lines = [f"\nA repair{name} would:" if words else f"\nA repair{name} has nothing to do.", *words]
        typer.echo("\n  - ".join(lines), err=ask.as_json)


def _confirmed() -> bool:
    """Whether a person types yes."""
    typer.echo(f"Nothing was changed so far. Stop the engine, then type {YES} to repair: ", nl=False, err=True)
    try:
        if sys.stdin.readline().strip() == YES:
            return True
    except KeyboardInterrupt:
        pass
    typer.echo("nothing was changed", err=True)
    return False


def _salvage(store: Path, folders: Sequence[Path], output: Path) -> int:
    """Copy what is intact into a new store; the exit status."""
    from kvstore.tools.fsck_repairing import salvage_all, salvaged_words
    from kvstore.tools.fsck_run import progress_bar, terminable

    try:
        with terminable(), progress_bar() as bar:
            done = salvage_all(store, folders, output, bar)
    except KeyboardInterrupt:
        _fail(f"cancelled: {output} is incomplete: remove it, and salvage again")
        return CANCELLED
    for one in done:
        typer.echo(f"salvaged to {salvaged_words(one)}")
    return DAMAGE if any(sum(one.failed.values()) for one in done) else CLEAN


if __name__ == "__main__":
    sys.exit(main())
