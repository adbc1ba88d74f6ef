"""What the counters of a result mean, one line each: for pages, and for ``kvsim help``."""

COUNTERS = {
    "prefetch": {
        "fetched_pages": "read from disk for requests that wait",
        "used_pages": "fetched, and used by the request that they were fetched for",
        "wasted_pages": "fetched, and not used by the request that they were fetched for",
        "refused_by_threshold_pages": "on disk and not fetched: too few of the prompt's pages were there",
        "refused_by_rate_limit_pages": "on disk and not fetched: as much as the rate limit allows was being fetched",
        "refused_by_memory_pages": "on disk and not fetched: the tier above had no room",
    },
    "tool_calls": {
        "calls": "requests that another one continues, once a tool or the user has answered",
        "offloads": "calls at whose beginning pages have left the GPU for the tier below",
        "offloaded_pages": "left the GPU at the beginning of a call, copied before or not",
        "no_room_offloads": "calls whose pages have stayed, for lack of room in the tier below",
        "uploads": "calls before whose expected end pages have been loaded to the GPU",
        "uploaded_pages": "loaded to the GPU before a call was expected to end",
        "used_pages": "uploaded, and found on the GPU by the request that continues the call",
        "wasted_pages": "uploaded, and not found there: evicted before it came, or it was sent to another engine",
        "no_room_uploads": "calls whose pages were not uploaded, since requests waited or the GPU had no room",
    },
    "placement": {
        "written_pages": "copied to a tier below",
        "loaded_pages": "loaded to a GPU",
        "fetched_pages": "read into a tier between the one that had them and a GPU",
        "revived_pages": "used again while they were being written down, and therefore kept on the GPU",
        "no_room_pages": "not copied, for lack of room in the tier below",
        "dropped_pages": "evicted without a copy left in any tier",
        "unreadable_pages": "copies that were dropped because they could not be read",
    },
    "checkpoints": {
        "saved": "states saved",
        "used": "requests that began from a saved state",
        "evicted": "states that are in no tier any more",
        "detached": "states that were kept when the KV of their prefix left the GPU",
        "no_room": "states not saved, because everything in the tier was in use",
        "bytes": "bytes of all states saved",
        "tokens_lost_to_missing_state": "prompt tokens whose KV was cached, but after the deepest state that could be used",
    },
}
"""By field of ``result.json`` and name."""


def counter_meanings(topic: str) -> list[tuple[str, str]]:
    """Return names and meanings of the counters of a name, with or without their field."""
    named = [(f"{kind}.{name}", meaning) for kind, counters in COUNTERS.items() for name, meaning in counters.items()]
    return [(name, meaning) for name, meaning in named if topic in (name, name.partition(".")[2])]
