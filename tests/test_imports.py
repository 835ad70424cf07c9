"""The house: imports point one way, kernels and engines stay apart, nothing executes stored bytes, files stay short.

RANKS is the order. A module imports only modules of lower ranks. Every module is listed, so that a new file needs a
decision: put it where its imports allow, as low as possible.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"kvstore": ROOT / "kvstore", "kvstore.kernels": ROOT / "kernels", "kvstore.tools": ROOT / "tools"}
MAX_LINES = 400

RANKS: tuple[tuple[str, ...], ...] = (
    # words and errors
    ("breaker", "errors", "eviction_table", "results", "loops_numba", "planes_numpy", "runs", "space"),
    ("protocol_wire",),
    ("protocol",),
    (
        "checksum",
        "eviction_hazard",
        "eviction_order",
        "eviction_types",
        "lifetime",
        "loops_states",
        "memory",
        "planes_numba",
        "storefile",
    ),
    ("comparing_sides", "eviction_entries", "planes"),
    ("comparing",),
    ("codec", "eviction_leaves", "stategeometry"),
    ("eviction_choice",),
    ("eviction_base",),
    ("eviction",),
    ("plain",),
    ("config", "environment", "identity", "layout"),
    ("group", "messages", "sharedmemory", "states"),
    ("loops_states_numpy", "statetensors"),
    ("cache",),
    # one block: its bytes in the cache, its bytes on disk
    ("geometry", "prefixes", "replicas", "span"),
    ("loops_numpy", "record", "steps"),
    ("counters", "reports", "shape", "snapshot"),
    ("cutting",),
    ("kernels",),
    ("kernels.tables", "kernels.walk"),
    ("kernels.checksum", "kernels.copy", "kernels.state"),
    ("compaction", "usage"),
    ("following", "quarantine"),
    # the two doors: to the engine's memory, to storage
    ("blockdb", "hostpath", "launches", "staging", "streams"),
    ("statepath",),
    ("audit", "copyback", "route", "storage"),
    ("checksumming_plan", "statecopy"),
    # files checked and repaired without an engine
    ("fsck", "fsck.alone", "fsck.findings", "fsck.pages", "fsck.restoring", "fsck.shards"),
    ("fsck.chunks", "fsck.mark", "fsck.options"),
    ("fsck.carving", "fsck.keeping", "fsck.pagemap"),
    ("fsck.inplace", "fsck.rebuilding", "fsck.salvage"),
    ("fsck.repair",),
    # a store looked into, and its records taken to another
    ("container", "inspect"),
    ("survey", "verify"),
    ("explain", "transport"),
    ("devicepath",),
    ("checksumming_device", "fitness", "stateroute"),
    ("transfer",),
    ("checksumming",),
    # files checked by processes of their own
    ("fsck.reading", "fsck.stages", "fsck.structure"),
    ("fsck.content", "fsck.glance"),
    ("fsck.survey",),
    ("fsck.checkpoint", "fsck.scanner", "fsck.team"),
    ("fsck.work",),
    ("fsck.scan",),
    ("keeper", "opening", "views"),
    # the side of the files, in this process or another
    ("shard",),
    ("covering", "evicting", "fetching", "matching", "siblings", "storing"),
    ("splicing",),
    ("wide",),
    ("inline",),
    ("serving",),
    ("worker",),
    ("channel",),
    ("link",),
    ("watching",),
    ("remoteget", "remoteput"),
    ("remote",),
    # the engine's side
    ("front",),
    ("loading", "saving"),
    ("store",),
    # the package's public names
    ("",),
    ("engines",),
    ("engines.transformers_states",),
    ("engines.transformers_layers", "engines.transformers_model"),
    ("engines.transformers",),
    ("engines.vllm.jobs", "engines.vllm.logs", "engines.vllm.lookup", "engines.vllm.refusals", "engines.vllm.specs"),
    ("engines.vllm.versions", "engines.vllm.weights"),
    (
        "engines.vllm.adapters",
        "engines.vllm.caches",
        "engines.vllm.options",
        "engines.vllm.stats",
        "engines.vllm.worker",
    ),
    ("engines.vllm.scheduler",),
    ("engines.vllm.identity", "engines.vllm.tier_rows"),
    ("engines.vllm.tier_config", "engines.vllm.tier_lookup"),
    ("engines.vllm.connector", "engines.vllm.tier"),
    ("engines.vllm",),
    # command lines
    ("tools",),
    ("tools.bench_limits", "tools.bench_report", "tools.bench_subject"),
    ("tools.bench_table",),
    ("tools.bench_busy", "tools.bench_fsck", "tools.bench_steady"),
    ("tools.gpu_device", "tools.gpu_report", "tools.gpu_torch"),
    ("tools.gpu_host_cost", "tools.gpu_memory", "tools.gpu_transfers"),
    ("tools.gpu_cases",),
    ("tools.gpu_kernels",),
    ("tools.gpu_run",),
    ("tools.bench_gpu",),
    ("tools.demo_damage", "tools.demo_text", "tools.model", "tools.setup_venv"),
    ("tools.bench", "tools.demo_model", "tools.drop", "tools.replay"),
    ("tools.fsck_options", "tools.fsck_outcome", "tools.fsck_style"),
    ("tools.fsck_json", "tools.fsck_markup", "tools.fsck_repairing", "tools.fsck_run", "tools.fsck_words"),
    ("tools.fsck_map", "tools.fsck_text"),
    ("tools.fsck_html",),
    ("tools.fsck",),
    ("tools.demo_second",),
    ("tools.commands",),
    ("tools.look_text",),
    ("tools.look",),
    ("tools.carry", "tools.quarantine"),
    ("tools.bench_codec", "tools.bench_vllm", "tools.cli", "tools.demo", "tools.setup_vllm", "tools.vllm_python"),
)
RANK = {f"kvstore.{name}".rstrip("."): rank for rank, names in enumerate(RANKS) for name in names}
OUTER = ("kvstore.tools", "kvstore.engines")
KERNELS = "kvstore.kernels"
KERNEL_CALLERS = {"kvstore.launches"}
ONLY_IN = {
    "numba": ("kvstore.loops_numba", "kvstore.loops_states"),
    "llvmlite": ("kvstore.loops_numba", "kvstore.loops_states"),
    "triton": (KERNELS,),
    "transformers": OUTER,
    "typer": ("kvstore.tools",),
    "vllm": ("kvstore.engines.vllm", "kvstore.tools.bench_vllm"),
    "rich": ("kvstore.tools",),
}
"""Where what is heavy or optional may be imported."""
DESERIALISERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
EXECUTORS = {"eval", "exec", "compile", "__import__"}
LOADERS = {"torch.load", "yaml.load"}
"""Unpickle unless told otherwise; numpy.load does when told so, by `allow_pickle`."""


def sources() -> dict[str, Path]:
    """Every module by its installed name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if package != "kvstore" or parts[0] not in ("kernels", "tools"):
                found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = sources()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports anywhere, and by importlib.import_module under a constant name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import: name the module in full"
            yield from from_import(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            name = node.args[0]
            assert isinstance(name, ast.Constant), f"line {node.lineno}: the module to import is computed"
            yield str(name.value)


def from_import(node: ast.ImportFrom) -> Iterator[str]:
    """`from package import module` means the modules; the package only where another name is taken from it."""
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    yield from (name for name in names if name in RANK)
    if not all(name in RANK for name in names):
        yield str(node.module)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def upward(module: str, tree: ast.AST) -> list[str]:
    """What a module imports of kvstore that is not of a lower rank."""
    own = {name for name in imports(tree) if inside(name, ("kvstore",))}
    return sorted(name for name in own if RANK.get(name, len(RANKS)) >= RANK[module])


def executes(tree: ast.AST) -> list[str]:
    """What in a module could run or unpickle bytes."""
    found = [name for name in imports(tree) if name.split(".")[0] in DESERIALISERS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in EXECUTORS:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def test_every_module_has_a_rank_and_every_rank_a_module() -> None:
    assert set(MODULES) == set(RANK), "list new modules in RANKS, take removed ones out"


@pytest.mark.parametrize("module", sorted(set(MODULES) & set(RANK)))
def test_a_module_imports_lower_ranks_alone(module: str) -> None:
    assert upward(module, TREES[module]) == []


@pytest.mark.parametrize("module", [name for name in MODULES if not inside(name, (*OUTER, KERNELS))])
def test_the_core_imports_no_tool_and_no_engine(module: str) -> None:
    assert [name for name in imports(TREES[module]) if inside(name, OUTER)] == []


def test_one_module_alone_imports_kernels() -> None:
    users = {m for m, tree in TREES.items() if any(inside(name, (KERNELS,)) for name in imports(tree))}
    assert {user for user in users if not inside(user, (KERNELS,))} <= KERNEL_CALLERS


@pytest.mark.parametrize("module", [name for name in MODULES if inside(name, (KERNELS,))])
def test_kernels_import_torch_triton_and_the_standard_library_alone(module: str) -> None:
    tops = {name.split(".")[0] for name in imports(TREES[module]) if not inside(name, (KERNELS,))}
    assert tops - sys.stdlib_module_names <= {"torch", "triton"}


def test_the_kernels_package_itself_imports_nothing_and_has_no_version() -> None:
    text = (ROOT / "kernels" / "__init__.py").read_text()
    assert list(imports(ast.parse(text))) == []
    assert "__version__" not in text


@pytest.mark.parametrize("library", ONLY_IN)
def test_what_is_heavy_or_optional_is_imported_in_its_place_alone(library: str) -> None:
    users = {m for m, tree in TREES.items() if any(inside(name, (library,)) for name in imports(tree))}
    assert sorted(user for user in users if not inside(user, ONLY_IN[library])) == []


def test_blockdb_alone_opens_lmdb_environments() -> None:
    openers = {m for m, tree in TREES.items() if "lmdb.open(" in ast.unparse(tree) and not inside(m, OUTER)}
    assert openers == {"kvstore.environment", "kvstore.fsck.reading"}, "a check reads files that no BlockDB would open"
    users = {m for m, tree in TREES.items() if "kvstore.environment" in imports(tree) and not inside(m, OUTER)}
    assert users == {"kvstore.compaction", "kvstore.following", "kvstore.fsck.reading"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_executes_or_unpickles_bytes(module: str) -> None:
    assert executes(TREES[module]) == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_file_is_one_room(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines: past about {MAX_LINES} a file is two rooms"


# --- the checks themselves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvstore.record", "import kvstore.blockdb"),
        ("kvstore.record", "from kvstore.store import KVStore"),
        ("kvstore.record", "from kvstore import store"),
        ("kvstore.record", "from kvstore import KVStore"),
        ("kvstore.blockdb", "from kvstore.hostpath import host_path"),
        ("kvstore.cache", "def f():\n    from kvstore.shard import Shard"),
        ("kvstore.cache", "import importlib\nimportlib.import_module('kvstore.record')"),
        ("kvstore.engines.transformers", "import kvstore.tools.model"),
        ("kvstore.errors", "import kvstore.not_listed"),
    ],
)
def test_an_import_that_points_upward_is_found(module: str, source: str) -> None:
    assert upward(module, ast.parse(source)) != []


@pytest.mark.parametrize("source", ["from . import store", "import importlib\nimportlib.import_module(name)"])
def test_an_import_that_hides_its_name_is_refused(source: str) -> None:
    with pytest.raises(AssertionError):
        list(imports(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import shelve as s",
        "eval('1')",
        "run = exec",
        "import torch\ntorch.load(f)",
        "np.load(f, allow_pickle=True)",
        "import importlib\nimportlib.import_module('pickle')",
    ],
)
def test_what_executes_or_unpickles_is_found(source: str) -> None:
    assert executes(ast.parse(source)) != []


@pytest.mark.parametrize("source", ["model.eval()", "import re\nre.compile('x')", "import json\njson.load(f)"])
def test_what_only_looks_like_it_is_not_found(source: str) -> None:
    assert executes(ast.parse(source)) == []
