"""Blocks that an engine tells one by one in a step, as one event."""

from collections.abc import Iterable, Iterator
from itertools import chain

from kvsim.kv_events.messages import BlockStored, Event


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join single blocks that follow one another in a batch, which some engines tell one by one, to one event."""
    group: list[BlockStored] = []
    for event in events:
        if isinstance(event, BlockStored) and len(event.block_hashes) == 1:
            if group and not _follows(event, group[-1]):
                yield _one(group)
                group = []
            group.append(event)
            continue
        if group:
            yield _one(group)
            group = []
        yield event
    if group:
        yield _one(group)


def _follows(event: BlockStored, before: BlockStored) -> bool:
    """Whether a block is the next one of the same path, told in the same way."""
    return (
        event.parent_block_hash == before.block_hashes[0]
        and event.block_size == before.block_size
        and (event.medium, event.group_idx, event.session_id) == (before.medium, before.group_idx, before.session_id)
        and (event.lora_name, event.lora_id, event.cache_salt) == (before.lora_name, before.lora_id, before.cache_salt)
        and (event.extra_keys is None) == (before.extra_keys is None)
    )


def _one(group: list[BlockStored]) -> BlockStored:
    first = group[0]
    if len(group) == 1:
        return first
    extras = None if first.extra_keys is None else tuple(chain.from_iterable(event.extra_keys or () for event in group))
    return BlockStored(
        block_hashes=tuple(event.block_hashes[0] for event in group),
        parent_block_hash=first.parent_block_hash,
        token_ids=tuple(chain.from_iterable(event.token_ids for event in group)),
        block_size=first.block_size,
        lora_id=first.lora_id,
        medium=first.medium,
        lora_name=first.lora_name,
        extra_keys=extras,
        group_idx=first.group_idx,
        session_id=first.session_id,
        cache_salt=first.cache_salt,
    )
