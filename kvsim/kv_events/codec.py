"""Messages of KV events read: msgpack, in each way that vLLM and SGLang have written it.

A batch is an array ``[ts, events, rank]``, in a few builds of vLLM a map. Its events are maps with a ``type``, or, of older
engines, arrays that begin with it. Fields were only ever added at the end, but for SGLang 0.5.18, whose array ends with a map if
there is a cache salt. Fields that nobody knows yet are passed over. ``dialects.py`` has who writes what.
"""

from functools import reduce
from math import isfinite
from operator import or_
from typing import Any

from msgspec import NODEFAULT, Struct, ValidationError, defstruct, msgpack, structs

from kvsim.kv_events.messages import KINDS, Event, EventBatch, EventError, Index

LONGEST_PROBLEM = 160
MAP_HEADS = {*range(0x80, 0x90), 0xDE, 0xDF}
"""First bytes of a map in msgpack."""


class _Metadata(Struct, gc=False):
    """The last field of SGLang 0.5.18's BlockStored, in the place of vLLM's adapter."""

    cache_salt: str | None = None


def _as_array(kind: type[Event]) -> type[Struct]:
    """Return a struct with the fields of an event, read from an array."""
    fields: list[Any] = []
    for field in structs.fields(kind):
        type_ = field.type | _Metadata if field.name == "lora_name" else field.type
        fields.append((field.name, type_) if field.default is NODEFAULT else (field.name, type_, field.default))
    return defstruct(kind.__name__, fields, array_like=True, tag=kind.__name__, gc=False)


def _decoder(kinds: tuple[type[Struct], ...], *, as_map: bool) -> "msgpack.Decoder[Any]":
    """Return what reads batches of such events."""
    event: Any = reduce(or_, kinds)
    fields: list[Any] = [("ts", float), ("events", tuple[event, ...]), ("rank", Index | None, None)]
    return msgpack.Decoder(
        defstruct("Batch", fields, array_like=not as_map, rename={"rank": "data_parallel_rank"} if as_map else None, gc=False)
    )


KIND_OF_ARRAY = {_as_array(kind): kind for kind in KINDS}
OF_MAPS = {as_map: _decoder(KINDS, as_map=as_map) for as_map in (False, True)}
"""What reads batches whose events are maps, by whether the batch is one."""
OF_ARRAYS = {as_map: _decoder((*KIND_OF_ARRAY,), as_map=as_map) for as_map in (False, True)}


def decode(data: bytes | memoryview) -> EventBatch:
    """Read a message's payload. Raises EventError for whatever is none, and nothing else."""
    try:
        batch = _decoded(data, as_map=data[0] in MAP_HEADS)
    except Exception as error:  # of msgspec, of texts that are none, of depth, of memory: the bytes are from outside
        raise EventError(_problem(error)) from None
    if not isfinite(batch.ts_s):
        raise EventError("not a batch of KV events: its time is no number")
    return batch


def _decoded(data: bytes | memoryview, *, as_map: bool) -> EventBatch:
    try:
        batch = OF_MAPS[as_map].decode(data)
        return EventBatch(batch.ts, batch.events, batch.rank)
    except ValidationError as error:
        otherwise = error
    try:
        batch = OF_ARRAYS[as_map].decode(data)
    except ValidationError as error:
        raise max(error, otherwise, key=_fit) from None
    return EventBatch(batch.ts, tuple([_from_array(event) for event in batch.events]), batch.rank)


def _from_array(event: Struct) -> Event:
    values = structs.astuple(event)
    made: Event = KIND_OF_ARRAY[type(event)](*values)
    metadata = getattr(made, "lora_name", None)
    if isinstance(metadata, _Metadata):
        made = structs.replace(made, lora_name=None, cache_salt=metadata.cache_salt)
    return made


def _fit(error: ValidationError) -> tuple[int, bool]:
    """How well a shape fitted where its decoder failed: how deep in the message, and whether not for the shape alone."""
    text = str(error)
    return len(text.partition(" - at ")[2]), not text.startswith(("Expected `object`, got", "Expected `array`, got"))


def _problem(error: Exception) -> str:
    """Return why a payload cannot be read, in one line."""
    if isinstance(error, IndexError):
        return "not a batch of KV events: it is empty"
    text = " ".join(str(error).split()) or type(error).__name__
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return f"not a batch of KV events: {shown[:LONGEST_PROBLEM]}"
