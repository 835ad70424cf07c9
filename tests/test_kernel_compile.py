"""What the compiler makes of the kernels for real GPUs, none of which need be present: every kernel, form and target.

A kernel that spills, keeps an array in local memory, loads in narrow pieces or reduces more than once still gives right
sums, and is slow. Compiling happens in processes of their own, since Triton's interpreter may be on in this one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MAX_REGISTERS = 128
BLOCK_SIZE, LAYERS, HEADS = 16, 2, 8
FORMS = (
    *("packed HND", "split NHD", "pairs NHD fp8", "K larger than V"),
    *("MLA 576 bf16", "MLA 656 bytes", "MLA 584 bytes", "8-byte K and V"),
)
"""By their names in tests.kernel_cases: one for each kind of code; tests/test_kernels.py runs the others too."""
FEW = ("split NHD",)
"""Forms that are compiled for a table of one slice as well."""
STATES = ("conv", "conv transposed", "recurrent fp32", "strided")
KERNELS = ("blocks", "slices", "gather", "scatter")
WIDE = {"conv": 1, "conv transposed": 1, "recurrent fp32": 2, "strided": 0}
"""16-byte loads of a tile of a state."""

CASES = [
    *(f"{kernel}, {form}" for kernel in KERNELS for form in FORMS),
    *(f"{kernel}, one slice, {form}" for kernel in KERNELS for form in FEW),
    *(f"state, {state}" for state in STATES),
]


# --- the compiling process ---------------------------------------------------------------------------------------


def slice_case(name: str) -> tuple[Any, Any]:
    """(kernel, table) of a case over slices."""
    from kvstore.kernels import checksum, copy
    from tests import kernel_cases

    kernel, form = name.split(", ", 1)
    few = form.startswith("one slice")
    cache_form = kernel_cases.FORMS[form.removeprefix("one slice, ")]
    layers = LAYERS if cache_form.heads > 1 else LAYERS * HEADS
    heads = HEADS if cache_form.heads > 1 else 1
    cache = replace(cache_form, heads=heads).cache(layers=layers, blocks=1, tokens=BLOCK_SIZE)
    entries = kernel_cases.engine_entries(cache.group(0))
    (table,) = kernel_cases.tables(cache.group(0), entries[:1] if few else entries)
    kernels = {"gather": copy.gather_kernel, "scatter": copy.scatter_kernel}
    return kernels.get(kernel, checksum.checksum_kernel), table


def slice_options(name: str, table: Any, warp: int) -> dict[str, int]:
    from kvstore.kernels import checksum, copy

    options: dict[str, Callable[[], dict[str, int]]] = {
        "blocks": lambda: checksum.checksum_options(table, checksum.MAX_SLICES, warp),
        "slices": lambda: checksum.checksum_options(table, 1, warp),
        "gather": lambda: copy.gather_options(table, warp),
        "scatter": lambda: copy.scatter_options(table, warp),
    }
    return options[name.split(", ")[0]]()


def state_case(name: str) -> Any:
    """The table of a case over states."""
    import torch

    from kvstore.kernels.state import StateAxis, StateEntry, state_table

    axes = {
        "conv": [StateAxis(8192, 4, 1, 0), StateAxis(4, 1, 0, 1)],
        "conv transposed": [StateAxis(4, 8192, 0, 1), StateAxis(8192, 1, 1, 0)],
        "recurrent fp32": [StateAxis(64, 16384, 1, 0), StateAxis(128, 128, 0, 128), StateAxis(128, 1, 0, 1)],
        "strided": [StateAxis(32, 70000, 1, 0), StateAxis(100, 300, 0, 50), StateAxis(50, 3, 0, 1)],
    }
    itemsize = 4 if name == "recurrent fp32" else 2
    return state_table([StateEntry(0, 2**24, 1)], axes[name], itemsize, torch.device("cpu"))


SIGNATURES = {
    "checksum_kernel": {
        **{"p_table": "*i64", "p_rows": "*i64", "p_out": "*i64"},
        **{"base": "i64", "slices": "i32", "chunks": "i32", "out_stride": "i64"},
    },
    "state_checksum_kernel": {"p_table": "*i64", "p_rows": "*i64", "p_out": "*i64", "layers": "i32", "chunks": "i32"},
    "gather_kernel": {
        **{"p_table": "*i64", "p_rows": "*i64"},
        **{"staging": "i64", "block_bytes": "i64", "slices": "i32", "chunks": "i32"},
    },
}
SIGNATURES["scatter_kernel"] = SIGNATURES["gather_kernel"]


def compile_kernel(kernel: Any, options: dict[str, int], target: str) -> Any:
    """Triton's compiled kernel, with what a launch passes: arguments that are not specialised, constants, warps."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = target.startswith("gfx")
    constants = {name: value for name, value in options.items() if name != "num_warps"}
    signature = {**SIGNATURES[kernel.__name__], **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constexprs=constants)
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return triton.compile(source, target=gpu, options={"num_warps": options["num_warps"]})


def inspect(compiled: Any) -> dict[str, int]:
    """Counts from the machine code."""
    return amd_counts(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else nvidia_counts(compiled.asm["cubin"])


AMD_WIDE_LOAD = r"\b(?:global|flat|buffer)_load_(?:dwordx4|b128)\b"
NVIDIA_WIDE_LOAD = r"\bLDG\.\S*\.128\b"


def amd_counts(text: str) -> dict[str, int]:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, f"no {name} in the assembly"
        return int(found[1])

    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "local": len(re.findall(r"\bscratch_(?:load|store)|\bbuffer_(?:load|store)\S* .*offen", text)),
        "spills": field("vgpr_spill_count") + field("sgpr_spill_count"),
        "wide loads": len(re.findall(AMD_WIDE_LOAD, text)),
        "wide stores": len(re.findall(r"\b(?:global|flat|buffer)_store_(?:dwordx4|b128)\b", text)),
        "stores": len(re.findall(r"\b(?:global|flat|buffer)_store_", text)),
        "first loads": len(re.findall(AMD_WIDE_LOAD, re.split(r"\b(?:global|flat|buffer)_store_", text)[0])),
        "reductions": len(re.findall(r"\b(?:global|flat|buffer)_atomic_add_(?:x2|u64)\b", text)),
        "atomics": len(re.findall(r"\b(?:global|flat|buffer)_atomic", text)),
    }


def nvidia_counts(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", run.stdout + run.stderr)
    assert usage, run.stdout + run.stderr
    return {
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "local": int(usage[3]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", run.stdout)),
        "wide loads": len(re.findall(NVIDIA_WIDE_LOAD, run.stdout)),
        "wide stores": len(re.findall(r"\bSTG\.\S*\.128\b", run.stdout)),
        "stores": len(re.findall(r"\bSTG\b", run.stdout)),
        "first loads": len(re.findall(NVIDIA_WIDE_LOAD, re.split(r"\bSTG\b", run.stdout)[0])),
        "reductions": len(re.findall(r"\b(?:REDG?|ATOMG?)\.E\.ADD\.64\.", run.stdout)),
        "atomics": len(re.findall(r"\b(?:REDG|RED|ATOMG|ATOM)\.", run.stdout)),
    }


def measure(name: str, target: str) -> dict[str, int]:
    """Counts of a case, and the tile that it was compiled for."""
    warp = 64 if target.startswith("gfx") else 32
    if name.startswith("state, "):
        from kvstore.kernels.state import state_checksum_kernel as kernel
        from kvstore.kernels.state import state_options

        options = state_options(state_case(name.removeprefix("state, ")), warp)
        return inspect(compile_kernel(kernel, options, target))
    kernel, table = slice_case(name)
    options = slice_options(name, table, warp)
    tile = options["SLICES"] * options["WIDTH"] // (2 * warp * options["num_warps"])
    planes = 2 if options["V_PIECES"] else 1
    counts = inspect(compile_kernel(kernel, options, target))
    return {**counts, "vector bytes": options["ALIGN"], "tile": tile, "planes": planes}


def unlike_a_launch() -> dict[str, int]:
    """{parameter: 1} for those that a launch would compile in another way than SIGNATURES says."""
    from kvstore.kernels import checksum, copy, state

    kernels = (checksum.checksum_kernel, copy.gather_kernel, copy.scatter_kernel, state.state_checksum_kernel)
    wrong = {}
    for kernel in kernels:
        signature = dict(SIGNATURES[kernel.__name__])
        for parameter in (p for p in kernel.params if not p.is_constexpr):
            kind = signature.pop(parameter.name)
            fits = parameter.annotation_type == ("" if kind.startswith("*") else kind)
            if not fits or not parameter.do_not_specialize:
                wrong[f"{kernel.__name__}.{parameter.name}"] = 1
        wrong |= dict.fromkeys(signature, 1)
    return wrong


def measure_all(target: str) -> dict[str, dict[str, int]]:
    """Counts of all cases, and of a tile that is far too large."""
    counts = {name: measure(name, target) for name in CASES}
    kernel, table = slice_case("blocks, split NHD")
    options = slice_options("blocks, split NHD", table, 64 if target == "gfx942" else 32)
    huge = {**options, "SLICES": 32, "WIDTH": options["WIDTH"], "num_warps": 1}
    too_large = inspect(compile_kernel(kernel, huge, target))
    return {**counts, "too large": too_large, "unlike a launch": unlike_a_launch()}


# --- the tests ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    """{target: {case: counts}}, two targets at a time."""
    found = {}
    for pair in (TARGETS[:2], TARGETS[2:]):
        running = {target: start(target, tmp_path_factory.mktemp(target)) for target in pair}
        for target, process in running.items():
            out, errors = process.communicate()
            assert process.returncode == 0, errors
            found[target] = json.loads(out)
    return found


def start(target: str, cache: Path) -> subprocess.Popen[str]:
    """A process that compiles all cases for a target, with a compiler cache of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.test_kernel_compile", target]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


Measured = dict[str, dict[str, dict[str, int]]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_spilled_and_registers_leave_room_for_programs(case: str, target: str, measured: Measured) -> None:
    counts = measured[target][case]
    assert (counts["spills"], counts["stack"], counts["local"]) == (0, 0, 0)
    assert 0 < counts["registers"] <= MAX_REGISTERS


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_one_reduction_of_64_bits_ends_a_checksum_and_none_a_copy(case: str, target: str, measured: Measured) -> None:
    counts = measured[target][case]
    copies = case.startswith(("gather", "scatter"))
    assert (counts["reductions"], counts["atomics"]) == ((0, 0) if copies else (1, 1))
    assert bool(counts["stores"]) == copies


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("state")])
def test_whole_vectors_are_loaded_and_stored(case: str, target: str, measured: Measured) -> None:
    """16 bytes at a time where the form's alignment allows; a compiler may unroll, so counts come in multiples."""
    counts = measured[target][case]
    tile = counts["tile"] * counts["planes"]
    if counts["vector bytes"] == 8:
        assert counts["wide loads"] <= counts["planes"] * 4
        assert counts["wide stores"] == 0
    else:
        assert counts["wide loads"] >= tile
        assert counts["wide stores"] == counts["stores"]
        assert counts["stores"] == 0 or counts["stores"] >= tile
        assert counts["first loads"] >= counts["tile"], "a thread's loads of a step come before its stores"
    assert counts["vector bytes"] == (8 if "584" in case or "8-byte" in case else 16)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("state", STATES)
def test_states_that_are_one_run_are_loaded_in_whole_vectors(state: str, target: str, measured: Measured) -> None:
    assert measured[target][f"state, {state}"]["wide loads"] >= WIDE[state]


@pytest.mark.parametrize("target", TARGETS)
def test_a_tile_that_is_too_large_is_noticed(target: str, measured: Measured) -> None:
    counts = measured[target]["too large"]
    assert counts["registers"] > MAX_REGISTERS or counts["spills"] or counts["stack"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_compiles_what_was_measured(target: str, measured: Measured) -> None:
    """No argument is specialised, so addresses and counts compile nothing anew in the middle of serving."""
    assert measured[target]["unlike a launch"] == {}


if __name__ == "__main__":
    print(json.dumps(measure_all(sys.argv[1])))
