"""Which engines share KV: everything that changes it makes another identity, and nothing else does."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore.engines.vllm import weights
from kvstore.engines.vllm.identity import digest, identity_of, unstable_hashes
from kvstore.engines.vllm.options import Options
from kvstore.engines.vllm.weights import CLOCK_STEP_S, weights_digest
from kvstore.errors import EngineError
from kvstore.identity import CacheIdentity, LayerSpec
from tests.vllm import models
from tests.vllm.configs import HfConfig, config, model

LAYERS = [LayerSpec(f"model.layers.{i}.self_attn.attn", "full", "bfloat16", 2, 64, 64) for i in range(3)]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OPTIONS = Options.of({"path": "kv"})


def made(
    served: Any, options: Options = OPTIONS, device: str = "cuda", layout: str = "LBNHC", backend: str = "auto"
) -> CacheIdentity:
    return identity_of(served, options, LAYERS, device, layout, backend)


def hf(**changed: Any) -> dict[str, Any]:
    """Both configurations of a model's, with changes."""
    plain = {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    found = HfConfig(**plain | changed)
    return {"hf_config": found, "hf_text_config": found}


def speculative(method: str, weights: int = 0, **changed: Any) -> Any:
    return SimpleNamespace(method=method, draft_model_config=model(seed=weights, **changed), draft_load_config=None)


OTHERS: dict[str, Callable[[], CacheIdentity]] = {
    "plain": lambda: made(config(**hf())),
    "weights": lambda: made(config(**hf(), seed=1)),
    "weights by hand": lambda: made(config(**hf()), Options.of({"path": "kv", "weights": "v1"})),
    "other weights by hand": lambda: made(config(**hf()), Options.of({"path": "kv", "weights": "v2"})),
    "dtype": lambda: made(config(**hf(), dtype=torch.float16)),
    "quantization": lambda: made(config(**hf(), quantization="fp8")),
    "its settings": lambda: made(config(**hf(), quantization_config={"ignore": ["lm_head"]})),
    "cache dtype": lambda: made(config(**hf(), cache_dtype="fp8")),
    "architecture": lambda: made(config(**hf(architectures=["MistralForCausalLM"]))),
    "rope": lambda: made(config(**hf(rope_parameters={"rope_type": "default", "rope_theta": 2e4}))),
    "rope scaling": lambda: made(config(**hf(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}))),
    "longrope": lambda: made(config(**hf(rope_parameters={"rope_type": "longrope"}))),
    "longrope, longer": lambda: made(config(**hf(rope_parameters={"rope_type": "longrope"}), max_model_len=4096)),
    "window": lambda: made(config(**hf(sliding_window=128))),
    "window off": lambda: made(config(**hf(), disable_sliding_window=True)),
    "implementation": lambda: made(config(**hf(), model_impl="transformers")),
    "device": lambda: made(config(**hf()), device="xpu"),
    "backend": lambda: made(config(**hf()), backend="FLASHINFER"),
    "a CPU's layout": lambda: made(config(**hf()), device="cpu"),
    "a CPU's other layout": lambda: made(config(**hf()), device="cpu", layout="LBHNC"),
    "packed": lambda: made(config(**hf()), backend="auto packed:FullAttentionSpec(head_size=32)"),
    "packed, another layout": lambda: made(
        config(**hf()), layout="LBHNC", backend="auto packed:FullAttentionSpec(head_size=32)"
    ),
    "draft": lambda: made(config(**hf(), speculative_config=speculative("eagle3"))),
    "draft's method": lambda: made(config(**hf(), speculative_config=speculative("draft_model"))),
    "draft's weights": lambda: made(config(**hf(), speculative_config=speculative("eagle3", weights=1))),
    "draft's dtype": lambda: made(config(**hf(), speculative_config=speculative("eagle3", dtype=torch.float16))),
    "image settings": lambda: made(config(**hf(), multimodal_config=SimpleNamespace(video_pruning_rate=0.5))),
    "model by hand": lambda: made(config(**hf()), Options.of({"path": "kv", "identity": {"model": "mine"}})),
    "more by hand": lambda: made(config(**hf()), Options.of({"path": "kv", "identity": {"adapter": 3}})),
}


def test_whatever_changes_kv_makes_another_identity() -> None:
    found = {name: make().canonical_json() for name, make in OTHERS.items()}
    twice = {name: [other for other in found if found[other] == text] for name, text in found.items()}
    assert all(same == [name] for name, same in twice.items())
    assert found == {name: make().canonical_json() for name, make in OTHERS.items()}


SAME: dict[str, Callable[[], CacheIdentity]] = {
    "path": lambda: made(config(**hf(), folder="elsewhere")),
    "what transformers notes": lambda: made(
        config(**hf(_name_or_path="x", transformers_version="9", _commit_hash="y"))
    ),
    "what a rank notes": lambda: made(config(**hf(dtype="bfloat16", tie_word_embeddings=False))),
    "length": lambda: made(config(**hf(), max_model_len=4096)),
    "ranks": lambda: made(config(**hf(), tp=2, rank=1)),
    "hash algorithm": lambda: made(config(**hf(), hashing="sha256_cbor")),
    "ngram": lambda: made(config(**hf(), speculative_config=speculative("ngram"))),
    "no draft": lambda: made(
        config(**hf(), speculative_config=SimpleNamespace(method="suffix", draft_model_config=None))
    ),
    "a GPU's layout": lambda: made(config(**hf()), layout="LBHNC"),
    "order of the layers": lambda: identity_of(config(**hf()), OPTIONS, LAYERS[::-1], "cuda", "LBNHC", "auto"),
}


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_change_kv_does_not_change_the_identity(case: str) -> None:
    assert SAME[case]().canonical_json() == OTHERS["plain"]().canonical_json()


def test_overrides_go_before_what_is_found() -> None:
    given = {"model": "m", "revision": "r", "dtype": "d", "quantization": "q", "backend": "b", "more": 1}
    found = made(config(**hf()), Options.of({"path": "kv", "identity": given}))
    assert (found.model, found.revision, found.dtype, found.quantization) == ("m", "r", "d", "q")
    assert (found.extra["backend"], found.extra["more"]) == ("b", 1)


def test_a_digest_has_no_addresses_in_it() -> None:
    class Plain:
        def __init__(self, value: int) -> None:
            self.value, self._hidden = value, object()

    class Kind(Enum):
        A, B = 1, 2

    for value, other in ((Plain(1), Plain(2)), (Kind.A, Kind.B), ({1, 2}, {1, 3}), (torch.float16, torch.bfloat16)):
        assert digest({"x": value}) != digest({"x": other})
    assert digest(Plain(1)) == digest(Plain(1))
    assert digest(digest) == digest(digest) != digest(made)
    assert len(digest(Plain(1))) == 32


# The weights.


def checkpoint(folder: Path, parts: int = 2) -> Path:
    """A folder like a checkpoint's: safetensors files with headers, an index, code and a configuration."""
    folder.mkdir()
    for part in range(parts):
        header = json.dumps({f"w{part}": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}).encode()
        (folder / f"model-{part}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        os.utime(folder / f"model-{part}.safetensors", ns=(0, 1000 + part))
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "modeling.py").write_text("x = 1")
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


LATER = 2.0**33
"""Seconds since the epoch: what is written here is older than what began then."""


def of_folder(folder: Path | str, load_format: str = "auto", **changed: Any) -> str:
    return weights_digest(model(folder=str(folder), **changed), SimpleNamespace(load_format=load_format), began=LATER)


def rewrite(file: Path, data: bytes, **stat: Any) -> None:
    """Change a file's bytes and leave its times."""
    times = file.stat().st_mtime_ns
    file.write_bytes(data)
    os.utime(file, ns=(times, times))


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    rewrite(file, bytes(data))


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file less": lambda f: (f / "model-1.safetensors").unlink(),
    "a file more": lambda f: (f / "pytorch_model.bin").write_bytes(b"x"),
    "a name": lambda f: (f / "model-1.safetensors").rename(f / "model-2.safetensors"),
    "a time": lambda f: os.utime(f / "model-1.safetensors", ns=(0, 1002)),
    "a size": lambda f: rewrite(f / "model-1.safetensors", (f / "model-1.safetensors").read_bytes() + b"x"),
    "a header": lambda f: flipped(f / "model-1.safetensors", 20),
    "weights": lambda f: flipped(f / "model-1.safetensors", -1),
    "the index": lambda f: (f / "model.safetensors.index.json").write_text("{ }"),
    "the code": lambda f: (f / "modeling.py").write_text("x = 2"),
    "the scales": lambda f: (f / "hf_quant_config.json").write_text("{ }"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_checkpoint_is_another(tmp_path: Path, case: str) -> None:
    folder = checkpoint(tmp_path / "a")
    before = of_folder(folder)
    assert re.fullmatch(r"files:[0-9a-f]{32}", before)
    CHANGES[case](folder)
    assert of_folder(folder) != before


def test_other_weights_in_files_alike_are_told_apart_at_any_size(tmp_path: Path) -> None:
    """Reproducible images have one time for all files."""
    digests = set()
    for seed in range(3):
        file = tmp_path / f"{seed}" / "model.bin"
        file.parent.mkdir()
        file.write_bytes(random.Random(seed).randbytes(3_000_001))
        os.utime(file, ns=(0, 0))
        digests.add(of_folder(file.parent))
    assert len(digests) == 3


def test_a_checkpoint_that_is_moved_or_copied_with_its_times_is_the_same(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    before = of_folder(folder)
    shutil.copytree(folder, tmp_path / "b")  # copies times
    assert of_folder(tmp_path / "b") == before
    (folder / "tokenizer.json").write_text("[]")
    (folder / "config.json").write_text("[]")
    assert of_folder(folder.rename(tmp_path / "c")) == before
    (tmp_path / "link").symlink_to(tmp_path / "c")
    assert of_folder(tmp_path / "link") == before


def test_weights_that_may_have_changed_since_they_were_loaded_are_no_later_engines(tmp_path: Path) -> None:
    """A folder that is copied over while an engine starts: what it serves need not be what lies there now."""
    folder = checkpoint(tmp_path / "a")
    settled = of_folder(folder)
    settings = (model(folder=str(folder)), SimpleNamespace(load_format="auto"))
    while time.time() < folder.stat().st_ctime + 2 * CLOCK_STEP_S:
        time.sleep(0.01)
    began = time.time()
    assert weights_digest(*settings, began) == settled
    (folder / "notes.txt").write_text("an entry beside them")
    assert weights_digest(*settings, began) == settled
    rewrite(folder / "model-1.safetensors", (folder / "model-1.safetensors").read_bytes())
    doubtful = weights_digest(*settings, began)
    assert doubtful.startswith(f"{settled}:changed ")
    assert weights_digest(*settings, began) == doubtful
    assert weights_digest(*settings, time.time() + 1) == settled


def test_it_is_known_when_a_process_started() -> None:
    before = time.time()
    child = subprocess.run(
        [sys.executable, "-c", "from kvstore.engines.vllm.weights import process_started as p; print(p())"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert before - 2 * CLOCK_STEP_S <= float(child.stdout) <= before + 1


def test_a_commit_is_taken_where_there_is_one(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert of_folder(snapshot) == f"commit:{COMMIT}"
    assert of_folder("owner/name", revision=COMMIT) == f"commit:{COMMIT}"
    assert of_folder("owner/name", revision="main", **hf(_commit_hash=COMMIT)) == f"commit:{COMMIT}"
    assert of_folder("owner/name:Q4_K_M", **hf(_commit_hash=COMMIT)) == f"commit:{COMMIT}:Q4_K_M"


def test_a_folder_is_no_commit_because_of_its_name_alone(tmp_path: Path) -> None:
    assert of_folder(checkpoint(tmp_path / COMMIT)).startswith("files:")


def test_a_file_and_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    before = of_folder(file)
    os.utime(file, ns=(0, 5))
    assert of_folder(file) != before
    assert of_folder("anything", "dummy", seed=5) == "dummy:5"


def test_weights_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    for given, text in (
        ({"folder": "owner/name", "revision": "main"}, "'owner/name' is no local folder, and its revision is 'main'"),
        ({"folder": str(tmp_path)}, "has no weights"),
        ({"folder": str(tmp_path), "model_weights": "s3://x"}, "'s3://x' are not local files"),
    ):
        with pytest.raises(EngineError, match=text + '.*"weights"'):
            of_folder(given.pop("folder"), **given)
    served = config(load_format="auto", folder="owner/name")
    assert made(served, Options.of({"path": "kv", "weights": "mine"})).revision == "mine"
    served.speculative_config = speculative("eagle3", folder="owner/draft")
    assert "draft" in made(served, Options.of({"path": "kv", "weights": "mine"})).extra


# Block hashes.


def test_hashes_with_a_random_seed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert unstable_hashes(config(hashing="sha256")) is None
    assert unstable_hashes(config(hashing="sha256_cbor")) is None
    for algorithm in ("xxhash", "xxhash_cbor"):
        assert f"'{algorithm}' and PYTHONHASHSEED is not set" in str(unstable_hashes(config(hashing=algorithm)))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert unstable_hashes(config(hashing="xxhash")) is None


def test_vllm_has_no_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    core, hashing = (pytest.importorskip(f"vllm.{name}") for name in ("v1.core.kv_cache_utils", "utils.hashing"))
    for seed in (None, "0", "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
            seeds = {core.resolve_none_hash_seed(hashing.get_hash_fn_by_name(name)) for _ in range(2)}
            assert (len(seeds) == 2) == (unstable_hashes(config(hashing=name)) is not None), (name, seed)


# vLLM's own configuration.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("llama", tmp_path_factory.mktemp("model") / "llama")


def real(folder: Path, **changed: Any) -> CacheIdentity:
    """The identity of an engine's real configuration."""
    arguments = pytest.importorskip("vllm.engine.arg_utils").EngineArgs
    plain: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "dtype": "bfloat16",
    }
    return made(arguments(**plain | changed).create_engine_config(), device="cpu")


def test_a_real_configuration_has_an_identity(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "process_started", lambda: LATER)
    before = real(folder)
    assert (before.model, before.dtype, before.quantization) == ("LlamaForCausalLM", "bfloat16", "")
    assert before.revision.startswith("files:")
    shutil.copytree(folder, tmp_path / "copy")
    same = {"moved": real(tmp_path / "copy"), "longer": real(folder, max_model_len=1024)}
    same |= {"seed": real(folder, seed=3), "named": real(folder, served_model_name="x")}
    assert {name for name, found in same.items() if found.canonical_json() != before.canonical_json()} == set()
    others = {
        "dtype": real(folder, dtype="float32"),
        "cache": real(folder, kv_cache_dtype="fp8"),
        "rope": real(folder, hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        "scaling": real(folder, hf_overrides={"rms_norm_eps": 1e-3}),
        "dummy": real(folder, load_format="dummy"),
    }
    others["other dummy"] = real(folder, load_format="dummy", seed=3)
    found = {found.canonical_json() for found in others.values()} | {before.canonical_json()}
    assert len(found) == len(others) + 1
