"""Which engines have cached how much of a prompt, as they report it."""

from collections.abc import Callable, Collection, Mapping, Sequence

from kvsim.core.request import Request
from kvsim.policies.routing.base import EngineStatus

Holders = Callable[[Request], Collection[int]]


def cached_pages(
    request: Request,
    engines: Sequence[EngineStatus],
    places: Mapping[int, int],
    holders: Holders | None,
    *,
    with_none: bool = False,
) -> dict[int, int]:
    """Return, by position among ``engines``, how many leading pages of the prompt each one's GPU has that has any.

    ``places`` are the positions by number. Only the engines are asked that ``holders`` names; None: all. ``with_none`` returns
    those of them that have none, too: the tiers below their GPUs may have some.
    """
    found: dict[int, int] = {}
    for at in range(len(engines)) if holders is None else [places[one] for one in holders(request) if one in places]:
        pages = engines[at].cached_pages(request)
        if pages or with_none:
            found[at] = pages
    return found
