"""Who writes KV events how: a row for each encoding that vLLM and SGLang have had."""

from typing import Any, NamedTuple

from msgspec import msgpack

from kvsim.errors import UsageError
from kvsim.kv_events.messages import BlockRemoved, BlockStored, Event, EventBatch
from kvsim.suggest import closest

_ARRAY = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
_VLLM = (*_ARRAY, "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")


class Dialect(NamedTuple):
    """How an engine of some versions writes events. What it has no field for is left out."""

    versions: str
    as_maps: bool
    """Else as arrays."""
    stored: tuple[str, ...]
    """The fields of BlockStored, in order."""
    removed: tuple[str, ...]
    """Those of BlockRemoved."""
    always: tuple[str, ...] = ()
    """Fields of maps that are written even if they are None. Arrays have all of theirs."""
    has_rank: bool = True
    """Whether a batch tells its rank."""
    salt_in_map: bool = False
    """Whether an array ends with a map of its cache salt, if there is one."""
    replays_topic: bool = False
    """Whether a replayed message has its topic, as a live one does: since vLLM 0.33 and SGLang 0.5.22 at the latest."""


DIALECTS = {
    "vllm": Dialect(
        "vLLM 0.24 and later",
        True,
        (*_VLLM, "locality", "ownership", "session_id", "lookahead_token_ids"),
        ("block_hashes", "medium", "group_idx", "locality", "ownership"),
        always=("parent_block_hash", "lora_id", "medium", "lora_name"),
        replays_topic=True,
    ),
    "vllm_arrays": Dialect("vLLM up to 0.23", False, _VLLM, ("block_hashes", "medium", "group_idx")),
    "vllm_first": Dialect("vLLM 0.9", False, _ARRAY, ("block_hashes",), has_rank=False),
    "sglang": Dialect(
        "SGLang 0.5.20 and later",
        True,
        (*_ARRAY, "medium", "cache_salt", "session_id", "lora_name"),
        ("block_hashes", "medium"),
        always=("parent_block_hash", "lora_id"),
        replays_topic=True,
    ),
    "sglang_arrays": Dialect("SGLang up to 0.5.19", False, (*_ARRAY, "medium"), ("block_hashes", "medium"), salt_in_map=True),
    "sglang_first": Dialect("SGLang 0.4", False, _ARRAY, ("block_hashes",), has_rank=False),
}

_pack = msgpack.Encoder().encode


def dialect_named(name: str) -> Dialect:
    """Return a row. Raises UsageError."""
    if name not in DIALECTS:
        raise UsageError(f"an encoding of KV events must be one of {', '.join(DIALECTS)}, not {name!r}{closest(name, DIALECTS)}")
    return DIALECTS[name]


def encode(batch: EventBatch, dialect: Dialect) -> bytes:
    """Return a batch as a message's payload, as an engine of that dialect writes it."""
    written = [_as_map(event, dialect) if dialect.as_maps else _as_array(event, dialect) for event in batch.events]
    return _pack([batch.ts_s, written, batch.rank] if dialect.has_rank else [batch.ts_s, written])


def _fields(event: Event, dialect: Dialect) -> tuple[str, ...]:
    if isinstance(event, BlockStored):
        return dialect.stored
    return dialect.removed if isinstance(event, BlockRemoved) else ()


def _as_map(event: Event, dialect: Dialect) -> dict[str, Any]:
    written: dict[str, Any] = {"type": type(event).__name__}
    for name in _fields(event, dialect):
        value = getattr(event, name)
        if value is not None or name in dialect.always:
            written[name] = value
    return written


def _as_array(event: Event, dialect: Dialect) -> list[Any]:
    written = [type(event).__name__, *(getattr(event, name) for name in _fields(event, dialect))]
    if dialect.salt_in_map and isinstance(event, BlockStored) and event.cache_salt is not None:
        written.append({"cache_salt": event.cache_salt})
    return written
