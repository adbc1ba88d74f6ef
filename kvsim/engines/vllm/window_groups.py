"""vLLM's KV cache groups of a model with sliding windows: how layers are grouped, and which pages a group keeps and names."""

from collections.abc import Iterable


def group_sizes(full_layers: int, window_layers: int) -> tuple[int, int, int]:
    """Return (layers of a group, groups of full attention, groups with a window).

    All groups have equally many layers, so that a block of the pool can serve any of them: as many as the rarer kind has, or as
    the commoner one if that has less than half as many more; the last group of a kind is padded
    (``_get_kv_cache_groups_uniform_page_size`` in vLLM's ``v1/core/kv_cache_planning.py``).
    """
    fewer, more = sorted((full_layers, window_layers))
    layers = more if 2 * more < 3 * fewer else fewer
    return layers, -(-full_layers // layers), -(-window_layers // layers)


class WindowGroups:
    """What the groups with a window have in common, in pages of a prompt counted from its beginning."""

    def __init__(
        self,
        groups: int,
        window_tokens: int,
        page_tokens: int,
        *,
        retention_tokens: int | None = 0,
        in_flight_tokens: int = 0,
        full_first: bool = False,
    ) -> None:
        """``retention_tokens``, a multiple of a page, is the interval at which pages get names (None: all do); at most
        ``in_flight_tokens`` tokens are computed at a time (0: no limit); ``full_first``: full attention is the first group."""
        self.groups = groups
        self.window_tokens = window_tokens
        self.page_tokens = page_tokens
        self.full_first = full_first
        self.run_pages = -(-(window_tokens - 1) // page_tokens)
        """Pages that have to be cached before a place where a prompt can begin."""
        self.most_pages: int | None = None
        """The most pages that a request holds in a group; None: no limit."""
        if in_flight_tokens:
            self.most_pages = -(-(window_tokens - 1 + in_flight_tokens) // page_tokens) + 1
        self.names_all = retention_tokens is None or 0 < retention_tokens <= self.run_pages * page_tokens
        """Whether every page gets a name."""
        self.interval_pages = (retention_tokens or 0) // page_tokens
        """Names are given to the pages before each multiple of this; 0: only to those before boundaries."""

    @property
    def names_answers(self) -> bool:
        """Whether pages of answers may get names."""
        return self.names_all or self.interval_pages > 0

    def pages_behind(self, tokens: int) -> int:
        """Return how many whole pages the token after the first ``tokens`` tokens does not attend to."""
        behind = tokens - self.window_tokens + 1
        return behind // self.page_tokens if behind > 0 else 0

    def named(self, first: int, end: int, boundaries: Iterable[int]) -> list[tuple[int, int]]:
        """Return which of the pages from ``first`` up to ``end`` get names, as ranges (first, end), ascending and apart.

        ``boundaries`` are numbers of pages.
        """
        if self.names_all:
            return [(first, end)] if first < end else []
        run, every = self.run_pages, self.interval_pages
        places = list(boundaries)
        if every:
            places += range((first // every + 1) * every, end + run, every)
        ranges: list[tuple[int, int]] = []
        for place in sorted(places):
            begin, stop = max(first, place - run), min(end, place)
            if ranges and begin <= ranges[-1][1]:
                begin = ranges[-1][1]
                if begin < stop:
                    ranges[-1] = ranges[-1][0], stop
            elif begin < stop:
                ranges.append((begin, stop))
        return ranges
