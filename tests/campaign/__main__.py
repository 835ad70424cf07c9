"""python -m tests.campaign: run fault campaigns. Exit status 1 where one failed."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tests.campaign
from tests.campaign.framework import CAMPAIGNS, Campaign, Result, run, tell
from tests.campaign.parallel import Complain, Report, report_of, run_together


def load_campaigns() -> dict[str, Campaign]:
    """Every campaign of this package, by name."""
    for module in pkgutil.iter_modules(tests.campaign.__path__):
        if module.name != "__main__":
            importlib.import_module(f"tests.campaign.{module.name}")
    return dict(sorted(CAMPAIGNS.items()))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.campaign", description="Run fault campaigns.")
    made.add_argument("--list", action="store_true", help="say which campaigns there are")
    made.add_argument("--only", metavar="NAME[,NAME]", help="run these alone")
    made.add_argument("--full", action="store_true", help="the long form, for hours")
    made.add_argument("--seed", type=int, default=1, help="what all faults follow from (default 1)")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--faults", type=int, metavar="N", help="how many faults, instead of the form's number")
    which.add_argument("--fault", type=int, metavar="K", help="repeat fault K alone")
    made.add_argument("--scratch", type=Path, metavar="DIR", help="where stores are made (default: the system's tmp)")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="so many campaigns at a time (default 1)")
    made.add_argument("--verbose", action="store_true", help="print the details of every outcome that has some")
    return made


def choose(known: dict[str, Campaign], only: str | None) -> list[Campaign]:
    names = only.split(",") if only else list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no campaign {', '.join(unknown)}: there are {', '.join(known)}")
    return [known[name] for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit status."""
    options, known = parser().parse_args(arguments), load_campaigns()
    if options.list:
        for chosen in known.values():
            print(f"{chosen.name:12} quick {chosen.quick:>6}  full {chosen.full:>6}  {chosen.summary}")
        return 0
    failed = False
    for report in reports(options, choose(known, options.only)):
        print(*report.details * options.verbose, report.line, sep="\n", flush=True)
        failed |= report.failed
    return int(failed)


def reports(options: argparse.Namespace, chosen: Sequence[Campaign]) -> Iterator[Report]:
    """Run campaigns one after the other in this process, or several at a time in processes of their own."""
    numbers = None if options.faults is None else range(options.faults)
    numbers = numbers if options.fault is None else [options.fault]

    def one(campaign: Campaign, complain: Complain) -> Result:
        return run(campaign, options.seed, numbers, options.full, options.scratch, complain)

    if options.jobs > 1:
        return run_together(chosen, options.jobs, one, tell)
    return (report_of(campaign, one, tell) for campaign in chosen)


if __name__ == "__main__":
    sys.exit(main())
