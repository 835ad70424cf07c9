"""The GPU benchmark: proves the kernels on a device, then measures them. Needs torch, triton and numpy alone.

    python tools/bench_gpu.py              on a CUDA device, within four minutes
    python tools/bench_gpu.py --quick      one layout, two sizes
    python tools/bench_gpu.py --host-cost  the host's part alone, without a GPU
    python tools/bench_gpu.py --rehearse   every line of it on the CPU, in Triton's interpreter: figures mean nothing

Prints a table, progress to stderr, and writes a JSON (--json) as soon as each phase ends. docs/gpu.md says what the
figures mean. A missed target is a figure, and no failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvstore.tools.gpu_report import Report

if not __package__:  # run as a script: the checkout's own package first, and no top-level modules of this folder
    _HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE)]

DONE, MISMATCH, UNABLE, INCOMPLETE = range(4)
"""Exit status: a result was not the reference's (then nothing more is measured); it cannot run here; a phase failed
or was left out for want of time."""
JSON: Final = "bench_gpu.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    options = _options(arguments)
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined, so before anything is imported
    from kvstore.tools.gpu_device import BenchError, Mismatch
    from kvstore.tools.gpu_report import Report, table

    report = Report(None if options.json in (None, "-") else Path(options.json))
    status = UNABLE
    try:
        status = DONE if _run(options, report) else INCOMPLETE
    except Mismatch as error:
        _say(f"MISMATCH: {error}")
        status = MISMATCH
    except BenchError as error:
        _say(f"error: {error}")
    except Exception:  # Python's own status for it would be that of a mismatch
        _say(traceback.format_exc())
    if report.found:
        print(report.text() if options.json == "-" else table(report.found))
    return status


def _run(options: argparse.Namespace, report: Report) -> bool:
    """Whether all was done. Raises Mismatch or BenchError."""
    from kvstore.tools.gpu_device import Cuda, Rehearsal
    from kvstore.tools.gpu_host_cost import stubbed_cost
    from kvstore.tools.gpu_run import Plan, Run

    if options.host_cost:
        report.found["host_cost"] = stubbed_cost()
        report.save()
        return True
    plan = Plan(limit_s=options.limit)
    plan = plan.quick() if options.quick else plan
    plan = plan.rehearsal() if options.rehearse else plan
    place = Rehearsal() if options.rehearse else Cuda(options.device)
    return Run(plan, place, report, options.path, _say).run()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.json is None and not (options.host_cost or options.rehearse):
        options.json = JSON
    if options.json and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json {options.json}: expected a file in a folder that is there")
    return options


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bench_gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--device", default="cuda", help="torch's name of the CUDA device")
    made.add_argument(
        "--json",
        metavar="FILE",
        help=f"for the figures; - is stdout, in the table's place [{JSON} of a run on a device]",
    )
    made.add_argument("--path", type=Path, help="folder for the store's temporary one [$TMPDIR, or the current folder]")
    made.add_argument("--limit", type=float, default=240, help="seconds after which nothing new is begun [240]")
    made.add_argument("--quick", action="store_true", help="one layout, two sizes")
    made.add_argument("--host-cost", action="store_true", help="the host's part alone, without a GPU")
    made.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    return made


if __name__ == "__main__":
    sys.exit(main())
