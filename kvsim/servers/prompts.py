"""Token ids for the page ids of a trace."""

from collections.abc import Sequence

from kvsim.core.request import Request


def as_sent(requests: Sequence[Request], page_tokens: int) -> list[Request]:
    """Return the requests as a server sees them that is sent their prompts and generates answers of its own.

    Prompts have their full pages only. The pages of an answer, and one that begins in the prompt's last partial page, have ids
    that no other request has. Raises UsageError for requests that cannot be sent to a server.
    """
    raise NotImplementedError
