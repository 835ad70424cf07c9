"""The GPU benchmark's phases: first the proof, then everything that is measured, each written down as soon as it ends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvstore.tools import gpu_kernels, gpu_transfers
from kvstore.tools.gpu_cases import FORMS, Form, measured_forms, prove
from kvstore.tools.gpu_device import BenchError, Mismatch, Place
from kvstore.tools.gpu_host_cost import BATCHES, LAYERS, device_cost, stubbed_cost
from kvstore.tools.gpu_memory import MIB, Geometry, Memory
from kvstore.tools.gpu_report import Report

WARM_CALLS: Final = 200
"""Copies before anything is timed, so that the device's clocks are up."""
RESERVE: Final = {"kernels": 60, "end_to_end": 40, "costs": 10}
"""Seconds before the limit from which on a phase takes nothing new on."""
SHAPE: Final = {"layers": 32, "heads": 8, "tokens": 16, "channels": 128}
GEOMETRIES: Final = (
    Geometry("BHNC", "BHNC", **SHAPE),
    Geometry("2BNHD", "2BNHD", **SHAPE),
    Geometry("MLA", "BNC", layers=61, heads=1, tokens=64, channels=576),
)


@dataclass(frozen=True)
class Plan:
    """How much is done. calls: timed calls of each operation; batches, cost_layers: blocks a batch
    and layers of the host's cost. limit_s: after so long nothing new is begun."""

    geometries: tuple[Geometry, ...] = GEOMETRIES
    forms: dict[str, Form] = field(default_factory=lambda: measured_forms(GEOMETRIES) | FORMS)
    call_bytes: tuple[int, ...] = (8 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
    cache_bytes: int = 3 * 1024 * MIB
    staging_bytes: int = 1024 * MIB
    calls: int = 20
    end_to_end_bytes: int = 512 * MIB
    batch_bytes: int = 16 * MIB
    rounds: int = 5
    batches: tuple[int, ...] = BATCHES
    cost_layers: int = LAYERS
    limit_s: float = 240

    def quick(self) -> Plan:
        """One layout, two sizes, fewer calls; every form is still proved."""
        return replace(self, geometries=self.geometries[:1], call_bytes=(8 * MIB, 256 * MIB), calls=7, rounds=2)

    def rehearsal(self) -> Plan:
        """Everything, with so few bytes that Triton's interpreter gets through."""
        tiny = tuple(
            replace(g, layers=2, heads=min(2, g.heads), tokens=2, channels=min(72, g.channels)) for g in self.geometries
        )
        small = {name: replace(form, layers=2, blocks=3, tokens=3) for name, form in self.forms.items()}
        return Plan(
            geometries=tiny,
            forms=small | measured_forms(tiny),
            call_bytes=(2048, 8192),
            cache_bytes=64 * 1024,
            staging_bytes=16 * 1024,
            calls=2,
            end_to_end_bytes=16 * 1024,
            batch_bytes=4096,
            rounds=1,
            batches=(1, 3),
            cost_layers=1,
            limit_s=self.limit_s,
        )

    def described(self) -> dict[str, Any]:
        """For the report."""
        names = ("call_bytes", "cache_bytes", "calls", "end_to_end_bytes", "batch_bytes", "rounds", "limit_s")
        shapes = {g.name: vars(g) | {"block_bytes": g.block_bytes, "dtype": "bfloat16"} for g in self.geometries}
        return {name: getattr(self, name) for name in names} | {"geometries": shapes}


class Run:
    """One run of the benchmark: a plan, a place, and the report that grows with it.

    path: the folder of the store's temporary one; say: takes progress lines. Raises BenchError where the device has too
    little memory.
    """

    def __init__(self, plan: Plan, place: Place, report: Report, path: Path | None, say: Callable[[str], None]) -> None:
        self._plan, self._place, self._path, self._say = plan, place, path, say
        self._began, self._report, self._found = time.monotonic(), report, report.found
        self._found |= {"device": place.describe(), "plan": plan.described(), "complete": False}
        self._found |= {"seconds": {}, "errors": {}, "left_out": []}
        self._memory = Memory(place, plan.cache_bytes, plan.staging_bytes)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def say(self, line: str) -> None:
        """A progress line."""
        self._say(f"{self.seconds:6.1f} s  {line}")

    def run(self) -> bool:
        """All phases; whether all was done. Raises Mismatch, and BenchError where the proof cannot be made."""
        self._phase("correctness", self._prove)
        if why := self._found["errors"].get("correctness"):
            raise BenchError(f"the proof did not get through: {why.splitlines()[-1]}")
        for name, work in (("kernels", self._kernels), ("end_to_end", self._end_to_end), ("costs", self._costs)):
            self._phase(name, work)
        self._found["complete"] = not (self._found["errors"] or self._found["left_out"])
        self._found["seconds"]["all"] = self.seconds
        self._report.save()
        return bool(self._found["complete"])

    def _phase(self, name: str, work: Callable[[], None]) -> None:
        """Do one phase and write the report. What fails is noted, and the next phase is tried; a mismatch ends it all."""
        began = self.seconds
        self.say(name)
        try:
            work()
        except Mismatch as error:
            self._found["errors"][name] = f"mismatch: {error}"
            raise
        except Exception:
            self._found["errors"][name] = traceback.format_exc().rstrip()
            self.say(f"{name} FAILED: {self._found['errors'][name]}")
        finally:
            self._found["seconds"][name] = self.seconds - began
            self._report.save()

    def _late(self, phase: str, what: str) -> bool:
        """Whether `what` is left out, which is then noted."""
        late = self.seconds > self._plan.limit_s - RESERVE[phase]
        if late:
            self._found["left_out"].append(f"{phase}: {what}, after {self.seconds:.0f} s")
        return late

    def _prove(self) -> None:
        proved = self._found["correctness"] = dict[str, str]()
        prove(self._place, self._plan.forms, proved, self._proved)

    def _proved(self, line: str) -> None:
        self.say(line)
        self._report.save()

    def _kernels(self) -> None:
        plan, found = self._plan, self._found.setdefault("kernels", {})
        memory = self._memory
        for _ in range(WARM_CALLS):
            memory.staging.copy_(memory.cache[: memory.staging.numel()])
        for geometry in plan.geometries:
            for nbytes in plan.call_bytes:
                name = f"{geometry.name}, {nbytes / MIB:g} MiB"
                if not self._late("kernels", name):
                    made = gpu_kernels.measure(memory, geometry, nbytes, plan.calls)
                    found.setdefault(geometry.name, {})[str(nbytes)] = made
                    self._report.save()
                    self.say(name)

    def _end_to_end(self) -> None:
        plan, found = self._plan, self._found.setdefault("end_to_end", {})
        if self._late("end_to_end", "all of it"):
            return
        cache = self._memory.paged(plan.geometries[0])
        moves = gpu_transfers.Moves(cache, self._place.route(cache), plan.end_to_end_bytes, plan.batch_bytes)
        found["host_sums"] = gpu_transfers.host_sums()
        found["without_disk"] = gpu_transfers.without_disk(moves, plan.rounds)
        self.say("without disk")
        if not self._late("end_to_end", "with disk"):
            found["with_disk"] = self._with_disk(moves)

    def _with_disk(self, moves: gpu_transfers.Moves) -> dict[str, Any] | str:
        plan = self._plan
        try:
            return gpu_transfers.with_disk(moves, plan.rounds, plan.batch_bytes, self._path)
        except gpu_transfers.LeftOut as error:
            return f"left out: {error}"

    def _costs(self) -> None:
        self._found["host_cost"] = stubbed_cost(self._plan.batches)
        if not self._late("costs", "on the device"):
            self._found["device_cost"] = device_cost(self._place, self._plan.batches, self._plan.cost_layers)
