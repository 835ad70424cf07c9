"""kvstore in vLLM: a KV connector, and a secondary tier of vLLM's own offloading. docs/vllm.md has the configurations.

Importing this package needs no vLLM: a name is imported from its module when it is first asked for.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.engines.vllm.connector import KVStoreConnector
    from kvstore.engines.vllm.options import kv_checksum_enabled
    from kvstore.engines.vllm.tier import KVStoreTier

__all__ = ["KVStoreConnector", "KVStoreTier", "kv_checksum_enabled"]

_MODULES = {"KVStoreConnector": "connector", "KVStoreTier": "tier", "kv_checksum_enabled": "options"}

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = resolve_name(f"{__name__}.{_MODULES[name]}:{name}")
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
