"""The sources that settings describe."""

from pathlib import Path

from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.lines import Lines
from kvsim.shadow.sources.live_events import LiveEvents, RecordedEvents
from kvsim.shadow.sources.log import Log
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.sources.proxy import Proxy
from kvsim.shadow.sources.salt import Salt
from kvsim.shadow.sources.settings import SourceSettings


def sources_of(settings: SourceSettings, prompts: Prompts, salt: Salt, page_tokens: int) -> list[Source]:
    """Return the sources, not begun."""
    found: list[Source] = []
    if settings.listen is not None and settings.server is not None:
        found.append(
            Proxy(
                settings.server,
                settings.host,
                settings.listen,
                prompts,
                patience_s=settings.patience_s,
                drain_s=settings.drain_s,
            )
        )
    recorded = set(map(str, settings.recorded))
    for number, address in enumerate(settings.events):
        if address in recorded:
            found.append(RecordedEvents(Path(address)))
        else:
            replay = settings.replay[number] if settings.replay else None
            found.append(LiveEvents(address, replay or None, settings.topic, settings.ranks))
    if settings.log is not None:
        found.append(Log(settings.log, Lines(page_tokens, salt, prompts), follow=settings.follow))
    return found
