"""Every exception that kvstore raises.

Exceptions are for misuse and for stores that cannot be opened. Damaged data is never an exception: it is a
result (`GetResult.rejected`, `PutResult.failed`). Each message says what was given, what was expected and
what to do.
"""


class KVStoreError(Exception):
    """Base of every exception of kvstore."""


class ConfigError(KVStoreError, ValueError):
    """A configuration value or a rank is out of its range."""


class IdentityError(KVStoreError, ValueError):
    """An identity is incomplete, does not fit the cache, or another one has the same id in this store."""


class UnknownLayout(KVStoreError, ValueError):
    """A layout word is none of those that kvstore knows."""


class InvalidCache(KVStoreError, ValueError):
    """Tensors, groups or first heads do not describe one paged cache."""


class InvalidShape(InvalidCache):
    """A tensor's shape or memory does not fit its layout."""


class UnsupportedDtype(InvalidCache, TypeError):
    """A tensor's element type is not one that kvstore stores."""


class UnsupportedDevice(InvalidCache):
    """A tensor lies where this version of kvstore cannot reach it."""


class UnsupportedCache(InvalidCache):
    """A cache that the checksum cannot cover, with the reason."""


class UnknownGroup(KVStoreError, KeyError):
    """The cache has no such KV cache group."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidBlockHash(KVStoreError, ValueError):
    """A block hash is not 8 to 64 bytes, or is given twice in one call."""


class InvalidBlockId(KVStoreError, ValueError):
    """A block id is out of range or no integer."""


class DuplicateBlockId(InvalidBlockId):
    """A block id is given twice in one call: two blocks cannot lie in one place."""


class LengthMismatch(KVStoreError, ValueError):
    """As many block hashes as block ids are needed."""


class InvalidPosition(KVStoreError, ValueError):
    """`start` or `num_tokens` is negative, no integer or out of range."""


class NoValidTokens(InvalidPosition):
    """A block of the call lies wholly past the request's last token."""


class ProtocolError(KVStoreError, ValueError):
    """A message of the checksum protocol is malformed, of another version, or says what does not fit together."""


class InvalidTokens(KVStoreError, ValueError):
    """Token ids are not those of one request, or fewer than the cache holds."""


class EngineError(KVStoreError):
    """An engine's adapter was given a model or a store that it cannot serve, or the engine is not installed."""


class UnknownRecord(KVStoreError, LookupError):
    """No record has this key."""


class AmbiguousKey(KVStoreError, LookupError):
    """The records of several blocks have keys that begin so."""


class ExportDamaged(KVStoreError):
    """A file of exported records is none, was cut short, or changed since it was written."""


class StorePathError(KVStoreError, OSError):
    """The store's path cannot be used: a file in the way, or nothing there to read."""


class StorePermissionError(StorePathError, PermissionError):
    """The store's path exists, and this user may not read or write it."""


class UnsupportedFormat(KVStoreError):
    """The store was written by a newer version of kvstore; it is left untouched."""


class StoreDamaged(KVStoreError):
    """The store's files cannot be opened safely."""


class StoreAlreadyOpen(KVStoreError):
    """This process has the shard open already; LMDB allows one environment a process."""


class StoreLocked(KVStoreError):
    """Another process writes this shard; a shard has one writer."""


class StoreClosed(KVStoreError):
    """The store was closed."""


class StoreBusy(KVStoreError):
    """The store cannot be closed: calls are still in flight."""


class StoreUnavailable(KVStoreError):
    """The process that has the shard open ended, or did not answer in time; it is being started again."""


class StoreForked(KVStoreError):
    """The store was opened before a fork; the child must open its own."""


class ReadOnlyStore(KVStoreError):
    """The store was opened with mode="r"."""


class GraphCapture(KVStoreError):
    """A call of the store would become a part of the graph that the engine is capturing."""


class StagingMemoryError(KVStoreError):
    """There is no room for the memory in which blocks of a device are staged."""
