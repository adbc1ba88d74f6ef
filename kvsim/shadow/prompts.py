"""Turns live requests into requests of a cache, once for all ghosts of one page size."""

from collections import OrderedDict

import xxhash

from kvsim.core.request import Request
from kvsim.pages.extents import Extent, split_extents
from kvsim.shadow.live import LiveRequest
from kvsim.shadow.page_ids import LivePageIndex


class Sessions:
    """Numbers of sessions, and the turns that they have had."""

    def __init__(self, most: int) -> None:
        """``most``: sessions whose turns are counted; those without a request for longest are forgotten first."""
        self.most = most
        self._turns: OrderedDict[int, int] = OrderedDict()

    def place(self, session: str | None) -> tuple[int, int]:
        """Return the number of a session and which of its requests this is, from 0; (-1, 0) without a session."""
        if session is None:
            return -1, 0
        number = xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass")) >> 1
        turn = self._turns.pop(number, -1) + 1
        self._turns[number] = turn
        if len(self._turns) > self.most:
            self._turns.popitem(last=False)
        return number, turn


class Prompts:
    """Assigns page ids to requests, in pages of ``share`` pages of the source.

    A larger page is known by the key of its last page: keys are chained, so it stands for all before it. Ghosts of this page
    size share the requests, as runs of one trace do.
    """

    def __init__(self, page_tokens: int, share: int) -> None:
        """``page_tokens`` are those of the larger page."""
        self.page_tokens = page_tokens
        self.share = share
        self.index = LivePageIndex()
        self.recent: list[Extent] = []
        """The paths of requests since ids were last forgotten."""

    def request(self, live: LiveRequest, number: int, at_s: float, place: tuple[int, int]) -> Request:
        """Return a request for the caches, at ``at_s`` on their clock; ``place`` is its session and turn."""
        share, page_tokens = self.share, self.page_tokens
        keys = live.keys[share - 1 :: share]
        is_whole = len(live.keys) == live.prompt_tokens * share // page_tokens
        path = (live.keys + live.output_keys)[share - 1 :: share] if is_whole and live.output_keys else keys
        extents = self.index.lookup(path)
        self.recent += extents
        prompt, answer = split_extents(extents, len(keys)) if len(path) > len(keys) else (extents, ())
        return Request(
            index=number,
            arrival_s=at_s,
            prompt_tokens=live.prompt_tokens,
            output_tokens=live.output_tokens,
            runs=prompt,
            prompt_pages=len(keys),
            output_runs=answer,
            session=place[0],
            turn=place[1],
        )
