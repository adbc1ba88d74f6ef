"""The subtrees of a trace's prompts below the prefixes that many requests share, and samples of whole subtrees.

This is spatial sampling (Waldspurger et al.: Efficient MRC construction with SHARDS, FAST 2015) for prefix trees. Page by page it
would cut prompts to pieces, since a page is hit only together with all pages before it.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import xxhash

from kvsim.core.request import Request
from kvsim.trace.statistics import Stretches, uses_by_page

COMMON_SHARE = 0.01
"""Pages used by more than this share of the requests are common; subtrees begin with the pages that follow them."""
FEWEST_USERS = 10
"""Requests that share a page that is common, however short the trace."""
KEYS = 2**64


class Subtrees:
    """Which subtree each request belongs to: that of the first page of its prompt that is not common.

    Requests that share a page below the common ones are in one subtree. A prompt of common pages only is one by itself.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.common = Stretches()
        """Pages that many requests use, such as those of a system prompt."""
        starts, stops, uses = uses_by_page(requests)
        many = (uses > COMMON_SHARE * len(requests)) & (uses >= FEWEST_USERS)
        self.common_pages = int((stops - starts)[many].sum())
        for start, stop in zip(starts[many].tolist(), stops[many].tolist(), strict=True):
            self.common.add(start, stop - start)
        firsts = [self._first_page(request) for request in requests]
        self.keys, number = np.unique(np.array(firsts, dtype=np.int64), return_inverse=True)
        """What each subtree is known by, the same under every seed: its first page or, of common pages only, -1 - the request."""
        self.of_request: np.ndarray = number.reshape(-1)
        """The position in ``keys`` of each request's subtree."""

    def _first_page(self, request: Request) -> int:
        for start, pages in request.runs:
            known = self.common.known(start, pages)
            if known < pages:
                return start + known
        return -1 - request.index

    @cached_property
    def pages(self) -> np.ndarray:
        """The pages of each subtree, without common ones: each page is in one subtree only."""
        seen, new = self.common.copy(), []
        for request in self.requests:
            count = 0
            for start, pages in request.runs:
                known = seen.known(start, pages)
                if known < pages:
                    seen.add(start + known, pages - known)
                    count += pages - known
            new.append(count)
        return np.bincount(self.of_request, weights=new, minlength=len(self.keys)).astype(np.int64)

    def draws(self, share: float, number: int, *, seed: int) -> Iterator[np.ndarray]:
        """Yield ``number`` samples, each of about this ``share`` of the subtrees, as arrays of their positions in ``keys``.

        The samples have no subtree in common: ``share * number`` is at most 1. Whether a subtree is in one follows from its hash,
        so over all seeds each is in each sample with the same probability.
        """
        hashes = np.array([_hash(key, seed) for key in self.keys.tolist()], dtype=np.uint64)
        edges = [min(round(place * share * KEYS), KEYS) for place in range(number + 1)]
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
        cuts = [len(ordered) if edge == KEYS else int(np.searchsorted(ordered, np.uint64(edge))) for edge in edges]
        for begin, end in pairwise(cuts):
            yield np.sort(order[begin:end])

    def requests_in(self, subtrees: np.ndarray) -> np.ndarray:
        """Return the positions of the requests of these subtrees, in order of arrival."""
        inside = np.zeros(len(self.keys), dtype=bool)
        inside[subtrees] = True
        return np.flatnonzero(inside[self.of_request])


def _hash(key: int, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(key.to_bytes(8, "little", signed=True), seed=seed)
