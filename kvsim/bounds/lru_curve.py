"""The hits of LRU at every capacity, computed in one pass over a trace (Mattson et al.: Evaluation techniques for storage
hierarchies, IBM Systems Journal 9(2), 1970)."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvsim.bounds.reuse import FirstUses, Uses, previous_uses
from kvsim.core.request import Request


def usable_pages(requests: Sequence[Request], page_tokens: int, recompute_last_token: bool) -> list[int]:
    """Return the leading pages of each prompt that may be hits: all pages, or those that do not contain the last token."""
    if not recompute_last_token:
        return [request.prompt_pages for request in requests]
    return [request.lookup_pages(page_tokens) for request in requests]


class LruCurve:
    """The hits of LRU in one tier of any capacity, if each request ends before the next begins and answers occupy no pages.

    One stack serves all capacities: LRU with capacity C holds the top C pages. A request moves its pages to the top, the
    deepest page lowest. A page is hit by every capacity that is at least its position in the stack. A stretch of a prompt whose
    last user is request t is contiguous in the stack, below all pages used after t.

    A tier smaller than a request rejects it, so its content differs from the stack. The curve therefore holds from
    ``largest_pages`` on; for a smaller tier, build a curve from only the requests that fit.

    Only requests whose ``index`` is at least ``counted_from`` are counted.
    """

    def __init__(
        self, requests: Sequence[Request], page_tokens: int, *, recompute_last_token: bool, counted_from: int = 0
    ) -> None:
        uses, first = previous_uses([request.runs for request in requests])
        counted = np.array([request.index >= counted_from for request in requests], dtype=bool)
        pages = np.array([request.prompt_pages for request in requests], dtype=np.int64)
        tokens = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
        self.page_tokens = page_tokens
        self.largest_pages = int(pages.max(initial=0))
        """Pages of the largest prompt."""
        self.unique_pages = int(first.pages.sum())
        """Pages that an unlimited tier holds at the end."""
        self.prompt_tokens = int(tokens[counted].sum())
        self.prompt_pages = int(pages[counted].sum())
        above = pages_above(uses, first, pages)
        usable = np.array(usable_pages(requests, page_tokens, recompute_last_token), dtype=np.int64)
        self._short = page_tokens * pages - tokens  # tokens missing in the last page, if it is partial
        self._usable = usable
        self._pages = pages
        stretches = np.stack((uses.request, above, uses.begin, uses.end), axis=1)
        late = list(_with_one_slot_free(stretches, first, pages, usable)) if recompute_last_token else []
        for number, parts in late:
            stretches[number, 3] = stretches[number, 2]
            stretches = np.concatenate((stretches, np.array(parts, dtype=np.int64)))
        self._sum(stretches[counted[stretches[:, 0]]])

    def _sum(self, stretches: np.ndarray) -> None:
        """Store the capacities at which hits start and stop growing, and those from which a partial page is hit."""
        request, above, begin, end = stretches.T
        end = np.minimum(end, self._usable[request])
        some = begin < end
        request, above, begin, end = request[some], above[some], begin[some], end[some]
        edges = np.concatenate((above, above + end - begin))
        signs = np.repeat(np.array([1, -1]), len(above))
        order = np.argsort(edges, kind="stable")
        self._edges = edges[order]
        self._slopes = np.concatenate(([0], np.cumsum(signs[order])))
        self._moments = np.concatenate(([0], np.cumsum((signs * edges)[order])))
        partial = (end == self._pages[request]) & (self._short[request] > 0)
        places = (above + end - begin)[partial]
        order = np.argsort(places, kind="stable")
        self._partial_places = places[order]
        self._missing_tokens = np.concatenate(([0], np.cumsum(self._short[request[partial]][order])))

    def hit_pages(self, capacities: npt.ArrayLike) -> np.ndarray:
        """Return the hit pages of the counted requests at each capacity, in pages."""
        sizes = np.asarray(capacities, dtype=np.int64)
        passed = np.searchsorted(self._edges, sizes)
        return np.asarray(self._slopes[passed] * sizes - self._moments[passed])

    def hit_tokens(self, capacities: npt.ArrayLike) -> np.ndarray:
        """Return the hit tokens of the counted requests at each capacity; a partial page counts only its own tokens."""
        missing = self._missing_tokens[np.searchsorted(self._partial_places, np.asarray(capacities), side="right")]
        return np.asarray(self.hit_pages(capacities) * self.page_tokens - missing)

    def capacity_for(self, share: float) -> int:
        """Return the smallest capacity, in pages, that reaches this share of the hit tokens of an unlimited tier."""
        low, high = 0, self.unique_pages
        wanted = share * int(self.hit_tokens(high))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.hit_tokens(middle) >= wanted else (middle + 1, high)
        return low

    def reuse_distance(self, share: float) -> int:
        """Return the stack distance, in pages, that this share of the reused pages does not exceed."""
        low, high = 0, self.unique_pages
        wanted = share * int(self.hit_pages(high))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.hit_pages(middle) >= wanted else (middle + 1, high)
        return low


def pages_above(uses: Uses, first: FirstUses, pages: np.ndarray) -> np.ndarray:
    """Return, for each stretch of ``previous_uses``, the number of pages used after its last use and before the request.

    ``pages`` are the pages of each prompt. The pages whose last user is request t or an earlier one are all pages that those
    requests touched, minus those that later requests used again; all other pages seen so far were used after t.
    """
    new = np.bincount(first.request, weights=first.pages, minlength=len(pages)).astype(np.int64)
    seen_before = np.cumsum(new) - new
    touched = np.cumsum(pages)
    above: np.ndarray = seen_before[uses.request] - touched[uses.other] + sums_of_smaller(uses.other, uses.end - uses.begin)
    return above


def sums_of_smaller(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return, for each entry, the sum of the weights of earlier entries whose value is not larger. O(n log n).

    Within each block of positions, entries are sorted by value. In each round, entries in the first half of a block add their
    weights to entries in its second half; then each half becomes a block.
    """
    count = len(values)
    size = 1 << max(count - 1, 0).bit_length()
    position = np.concatenate((np.argsort(values, kind="stable"), np.arange(count, size)))
    padded = np.concatenate((weights, np.zeros(size - count, dtype=np.int64)))
    sums = np.zeros(size, dtype=np.int64)
    half = size // 2
    while half:
        blocks = position.reshape(-1, 2 * half)
        late = (blocks & half) > 0
        before = np.cumsum(np.where(late, 0, padded[blocks]), axis=1)
        sums[blocks[late]] += before[late]
        position = np.concatenate((blocks[~late].reshape(-1, half), blocks[late].reshape(-1, half)), axis=1)
        half //= 2
    return sums[:count]


Part = tuple[int, int, int, int]
"""Request, pages above in the stack, begin and end depth."""


def _with_one_slot_free(
    stretches: np.ndarray, first: FirstUses, pages: np.ndarray, usable: np.ndarray
) -> Iterator[tuple[int, list[Part]]]:
    """Yield the stretches whose hits differ because a tier has a free slot, each with the parts that replace it.

    A page that is cached but must not be hit is recomputed in a slot of its own, which evicts a page at the bottom of the tier.
    Afterwards that slot stays free until a request comes that is not fully cached. While tiers with capacities from ``low`` to
    ``high`` have a free slot, a page at one of these positions in the stack is present only from the next larger capacity on.
    """
    has_new = np.bincount(first.request, minlength=len(pages)) > 0
    repeats = np.flatnonzero((usable < pages) & ~has_new)
    if not len(repeats):
        return
    new = np.bincount(first.request, weights=first.pages, minlength=len(pages)).astype(np.int64)
    seen = np.cumsum(new)
    bounds = np.searchsorted(stretches[:, 0], np.arange(len(pages) + 1))
    done = -1
    for repeat in repeats.tolist():
        if repeat <= done:
            continue
        low, high, number = 0, -1, repeat
        while number == repeat or (low <= high and number < len(pages)):
            rows = range(bounds[number], bounds[number + 1])
            for row in rows:
                if parts := _pushed_down(stretches[row].tolist(), low, high):
                    yield row, parts
            if has_new[number]:
                low, high = 0, -1
            elif rows:
                _, above, begin, end = stretches[rows[-1]].tolist()
                lowest = above + end - begin
                if usable[number] < pages[number]:
                    low, high = lowest, int(seen[number])
                low = max(low, lowest + 1)
            done, number = number, number + 1


def _pushed_down(stretch: Sequence[int], low: int, high: int) -> list[Part]:
    """Return the stretch in parts, with the part at positions ``low ... high`` moved one down; empty if it has no such part."""
    request, above, begin, end = stretch
    from_depth = max(begin, begin + low - above - 1)
    to_depth = min(end, begin + high - above)
    if from_depth >= to_depth:
        return []
    parts = [
        (request, above, begin, from_depth),
        (request, above + from_depth - begin + 1, from_depth, to_depth),
        (request, above + to_depth - begin, to_depth, end),
    ]
    return [part for part in parts if part[2] < part[3]]
