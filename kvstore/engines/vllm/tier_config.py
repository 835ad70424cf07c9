"""Whose KV lies in vLLM's host memory: the identity of a tier's store, from what vLLM tells a tier and what it does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any, Final, NamedTuple

from kvstore.cache import PagedKVCache
from kvstore.engines.vllm.adapters import settings_of
from kvstore.engines.vllm.caches import backend_of
from kvstore.engines.vllm.identity import digest, identity_of
from kvstore.engines.vllm.options import Options
from kvstore.engines.vllm.specs import VllmGroup, groups_of
from kvstore.engines.vllm.tier_rows import GROUP, row_identity
from kvstore.engines.vllm.versions import installed_version
from kvstore.errors import ConfigError, UnsupportedCache
from kvstore.identity import CacheIdentity, Scalar

NAMED: Final = ("model", "revision", "dtype", "quantization")
"""What an identity has fields for; its overrides may have further names."""


class Engine(NamedTuple):
    """What vLLM's connectors are made of: its VllmConfig and KVCacheConfig."""

    vllm_config: Any
    kv_cache_config: Any


def find_engine(spec: Any) -> Engine | None:
    """The engine that a tier is made for; None where it cannot be found.

    vLLM gives a tier the name of the model and the shape of its cache, but not its revision, quantisation or overrides,
    without which KV of another model would be taken for this one's. Whoever makes a tier has the configurations, further up
    on the stack, under the names that vLLM's connectors have for them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        config, cache = frame.f_locals.get("vllm_config"), frame.f_locals.get("kv_cache_config")
        transfer = getattr(config, "kv_transfer_config", None)
        if transfer is not None and cache is not None and transfer.engine_id == spec.config.engine_id:
            return Engine(config, cache)
        frame = frame.f_back
    return None


def tier_identity(options: Options, spec: Any, cache: PagedKVCache, engine: Engine | None) -> CacheIdentity:
    """The identity of the rows. engine: from `find_engine`.

    Raises ConfigError where there is none and no option names the weights, EngineError where the weights cannot be told
    apart.
    """
    identity = _by_hand(options, spec) if engine is None else _of_engine(options, spec, cache, engine)
    [layer] = cache.group(GROUP).layers
    rows = row_identity(spec, layer.heads * layer.cell_bytes, installed_version())
    return replace(identity, extra={**identity.extra, **rows}, layers=None)


def _of_engine(options: Options, spec: Any, cache: PagedKVCache, engine: Engine) -> CacheIdentity:
    config = engine.vllm_config
    layers = [layer.spec(GROUP) for layer in cache.group(GROUP).layers]
    device, layout = str(config.device_config.device_type), str(spec.config.kv_cache_layout)
    found = identity_of(config, options, layers, device, layout, backend_of(config, _groups(engine.kv_cache_config)))
    # Of opaque bytes all of this is part, whatever the backend.
    return replace(found, extra={**found.extra, "device": device, "layout": layout, **_of_adapters(options, config)})


def _of_adapters(options: Options, config: Any) -> dict[str, Scalar]:
    """How LoRA adapters are applied. A tier is not told of a request's adapter: vLLM's keys have its name and path alone."""
    if config.lora_config is None:
        return {}
    if options.adapters != "fixed":
        raise ConfigError(
            "LoRA is enabled, and a tier cannot see whether the files of an adapter changed under its path: use "
            'KVStoreConnector, or give "adapters": "fixed" in the tier\'s configuration where every adapter\'s name and path '
            "mean the same weights for ever"
        )
    return {"lora": digest(settings_of(config.lora_config))}


def _groups(kv_cache_config: Any) -> list[VllmGroup]:
    """vLLM's groups; none where they have no description in kvstore's words, which opaque rows can do without."""
    try:
        return groups_of(kv_cache_config)
    except UnsupportedCache:
        return []


def _by_hand(options: Options, spec: Any) -> CacheIdentity:
    if not options.weights and "model" not in options.identity:
        raise ConfigError(
            "vLLM's configuration was not found, without which KV of another revision or quantisation could be taken for "
            "this model's: give \"weights\" in the tier's configuration, a text that names the weights and all that changes "
            "what they compute"
        )
    given = dict(options.identity)
    named = {name: str(given.pop(name)) for name in NAMED if name in given}
    extra: dict[str, Scalar] = {**given, "weights": options.weights}
    return CacheIdentity(**{"model": spec.config.model.name, **named}, extra=extra)
