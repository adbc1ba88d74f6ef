"""The sources that settings describe."""

from kvsim.shadow.sources.base import Source
from kvsim.shadow.sources.lines import Lines
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
                grace_s=settings.grace_s,
            )
        )
    if settings.log is not None:
        found.append(Log(settings.log, Lines(page_tokens, salt, prompts), follow=settings.follow))
    return found
