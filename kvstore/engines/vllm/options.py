"""What an operator writes into kv_connector_extra_config, and which engines are served at all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from kvstore.config import StoreConfig
from kvstore.engines.vllm.specs import groups_of
from kvstore.errors import ConfigError, EngineError, UnsupportedCache
from kvstore.identity import Scalar

IO_MODES: Final = ("process", "inline")
SETTINGS: Final = tuple(f.name for f in fields(StoreConfig) if f.name != "capacity_bytes")
ADAPTERS: Final = ("checked", "fixed")
KEYS: Final = ("path", "capacity", "policy", "io", "identity", "weights", "adapters", *SETTINGS)
UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
CONNECTOR: Final = "KVStoreConnector"
PACKAGE: Final = "kvstore.engines.vllm"
ROLES: Final = {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}


@dataclass(frozen=True)
class Options:
    """What kv_connector_extra_config says; `Options.of` reads and checks it.

    path: the store's folder, one for all ranks, each of which has a shard in it. store_config: how each shard is kept. Its
    capacity is that of one rank: an engine of 8 ranks with "200G" fills up to 1.6 TiB. Its durability is "process" unless
    given, not StoreConfig's "commit": a KV cache can be computed again, and what is stored survives restarts and crashes of
    the engine; only where the machine itself goes down is the store emptied at its next opening. io: "process" keeps the
    disk out of the engine's process, "inline" does not. identity: overrides of the identity's model, revision, dtype and
    quantization; any other name becomes one more of its `extra`. weights: names the weights by hand, those of a
    draft model too, in place of a digest. adapters: "checked" tells LoRA adapters apart by their content (see `Adapters`),
    "fixed" by name and path alone.
    """

    path: str
    store_config: StoreConfig
    io: str = "process"
    identity: Mapping[str, Scalar] = field(default_factory=dict)
    weights: str = ""
    adapters: str = ADAPTERS[0]

    def folder(self, parallel: Any) -> Path:
        """The store's folder. Engines that run data-parallel have one each, since a shard has one writer; of a dense model's
        engines each believes that it is the only one, and has its number all the same. parallel: what has vLLM's
        data_parallel_size and data_parallel_index."""
        index = parallel.data_parallel_index
        return Path(self.path, f"dp{index}") if parallel.data_parallel_size > 1 or index else Path(self.path)

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Options:
        """Read kv_connector_extra_config.

        Keys: path (required), capacity (bytes, or text such as "512M", "200G", "1.5T", powers of 1024; 16 GiB by default),
        policy (another name of eviction), io, identity, weights, adapters, and every further field of StoreConfig by its
        own name. Raises ConfigError, which names an unknown key.
        """
        given = _mapping("kv_connector_extra_config", {} if extra is None else extra)
        if unknown := [key for key in given if key not in KEYS]:
            raise ConfigError(_unknown(unknown[0]))
        path, weights = given.get("path"), given.get("weights", "")
        if not isinstance(path, str) or not path:
            raise ConfigError(
                "kv_connector_extra_config: path is "
                f"{'missing' if path is None else repr(path)}: expected the folder of the store, a non-empty text"
            )
        if not isinstance(weights, str):
            raise ConfigError(
                f"kv_connector_extra_config: weights is {weights!r}: expected a text that names the weights"
            )
        io, adapters = _one_of(given, "io", IO_MODES), _one_of(given, "adapters", ADAPTERS)
        return cls(path, _store_config(given), io, _identity(given.get("identity", {})), weights, adapters)


def _one_of(given: Mapping[str, Any], key: str, known: Sequence[str]) -> str:
    """An option's value; the first one where it is not given."""
    value = given.get(key, known[0])
    if value not in known:
        raise ConfigError(f"kv_connector_extra_config: {key} is {value!r}: expected one of {', '.join(known)}")
    return str(value)


def _mapping(name: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {given!r}: expected {{name: value}}")
    return dict(given)


def _unknown(key: object) -> str:
    close = difflib.get_close_matches(str(key), KEYS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"kv_connector_extra_config has the unknown key {key!r}{hint}; the known keys are {', '.join(KEYS)}"


def _store_config(given: Mapping[str, Any]) -> StoreConfig:
    chosen = {"durability": "process"} | {name: given[name] for name in SETTINGS if name in given}
    if "policy" in given and chosen.setdefault("eviction", given["policy"]) != given["policy"]:
        raise ConfigError(
            f"kv_connector_extra_config: policy is {given['policy']!r} and eviction {given['eviction']!r}: they are two "
            "names of one setting; give one of them"
        )
    if "capacity" in given:
        chosen["capacity_bytes"] = parse_bytes("capacity", given["capacity"])
    try:
        return StoreConfig(**chosen)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None


def parse_bytes(name: str, given: object) -> int:
    """Bytes, from an integer or a text with a unit of powers of 1024, such as "1.5T"; raises ConfigError."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", given, re.I) if isinstance(given, str) else None
    if parts is None:
        raise ConfigError(
            f"kv_connector_extra_config: {name} is {given!r}: expected bytes, or a number with K, M, G or T (powers of 1024) "
            'such as "512M", "200G" or "1.5T"'
        )
    return (
        int(float(parts[1]) * UNITS[parts[2].upper()]) if "." in parts[1] else int(parts[1]) * UNITS[parts[2].upper()]
    )


def _identity(given: object) -> dict[str, Scalar]:
    overrides = _mapping("kv_connector_extra_config: identity", given)
    for name, value in overrides.items():
        if not isinstance(name, str) or not isinstance(value, Scalar):
            raise ConfigError(
                f"kv_connector_extra_config: identity[{name!r}] is {value!r}: expected a text, number, true, false or null"
            )
    return overrides


def roles(kv_transfer_config: Any) -> tuple[bool, bool]:
    """Whether this engine stores, and whether it loads: kv_both both, kv_producer stores, kv_consumer loads.

    Raises ConfigError for another kv_role.
    """
    role = _get(kv_transfer_config, "kv_role")
    if role not in ROLES:
        raise ConfigError(f"kv_role is {role!r}: expected one of {', '.join(ROLES)}")
    return ROLES[role]


def failure_policy_notice(kv_transfer_config: Any) -> str:
    """One line for the log at start: which kv_load_failure_policy is set, and what becomes of a request whose blocks were
    refused."""
    policy = _get(kv_transfer_config, "kv_load_failure_policy") or "fail"
    if policy == "recompute":
        return 'kv_load_failure_policy is "recompute": blocks that fail verification are computed again'
    return (
        f'kv_load_failure_policy is "{policy}" (vLLM\'s default is "fail"): a request whose blocks fail verification ends '
        'with an error; set "kv_load_failure_policy": "recompute" in --kv-transfer-config to have them computed again'
    )


def kv_checksum_enabled(config: Any) -> bool:
    """Whether the KV that this engine loads is verified by kvstore where the engine reads it.

    config: a VllmConfig, a KVTransferConfig, the JSON of --kv-transfer-config as a dict, or None. True for KVStoreConnector,
    also as one of MultiConnector's; whatever that one's other connectors load is not verified. False for KVStoreTier below
    vLLM's OffloadingConnector: it verifies in host memory, and vLLM's own copy from there to the device is not verified.
    """
    transfer = _get(config, "kv_transfer_config", config)
    return _is_connector(transfer) or any(map(_is_connector, _children(transfer)))


def _is_connector(transfer: Any) -> bool:
    """The name alone would be some other package's class, or vLLM's own connector of that name."""
    path = str(_get(transfer, "kv_connector_module_path") or "")
    return _get(transfer, "kv_connector") == CONNECTOR and (path == PACKAGE or path.startswith(PACKAGE + "."))


def _children(transfer: Any) -> Iterable[Any]:
    extra = _get(transfer, "kv_connector_extra_config") or {}
    return (_get(extra, "connectors") or ()) if _get(transfer, "kv_connector") == "MultiConnector" else ()


def _get(config: Any, name: str, default: Any = None) -> Any:
    """An attribute, or a key, of a configuration."""
    return config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse at start what this connector cannot serve.

    Raises EngineError for context parallelism and roles, UnsupportedCache for encoder-decoder models and for KV cache groups
    whose blocks cannot be described, such as those of Mamba states; both say what to do.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise EngineError(
                f"{name} is {size}: with context parallelism a block's tokens are dealt out to several ranks, which kvstore "
                "does not describe; expected 1"
            )
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise EngineError(
            "enable_sleep_mode is set: a sleeping engine unmaps the cache that kvstore copies from and to; leave it out"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise UnsupportedCache(
            "this is an encoder-decoder model, whose KV does not follow from the decoder's tokens: expected a decoder-only "
            "one"
        )
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        roles(vllm_config.kv_transfer_config)
    groups_of(kv_cache_config)


def check_attention(vllm_config: Any) -> None:
    """Refuse models for which vLLM's attention does not read what is loaded. Raises UnsupportedCache."""
    if getattr(vllm_config.model_config, "use_mla", False) and vllm_config.device_config.device_type == "cpu":
        raise UnsupportedCache(
            "this model has latent attention (MLA), for which vLLM computes a prompt on a CPU as if nothing came before it "
            "(it switches prefix caching off): what is loaded would be ignored; expected a GPU, or another model"
        )
