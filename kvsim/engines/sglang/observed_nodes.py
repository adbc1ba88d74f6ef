"""SGLang's radix cache on the GPU for requests as a real server admitted them, step by step."""

from typing import Any, cast

from kvsim.core.lease import FIRST, LOST
from kvsim.core.request import Request
from kvsim.core.serving import Server
from kvsim.core.tree import RadixTree
from kvsim.engines.sglang.stepped import NodesLease, SteppedNodes
from kvsim.pages.extents import Extent


class ObservedNodes(Server):
    """``SteppedNodes``, the cache of simulations, with the steps that a server has formed.

    begin         looks up and pins; there must be room for all known tokens
    begin_chunk   the step computes a prompt's chunk
    decode        the step computes a token of an answer, unless it computes prompts
    end_pass      the step is formed: it takes the memory of its chunks or, without any, of its tokens
    """

    takes_by_step = True
    tries_waiting = True

    def __init__(self, cache: SteppedNodes, *, looks_ahead: bool, mixed_chunk: bool) -> None:
        self.cache = cache
        self.tiers, self.page_tokens = cache.tiers, cache.page_tokens
        self.counts = cache.residency.counts
        self.decodes_past_end = looks_ahead and cache.differs.decodes_past_end
        self._mixed_chunk = mixed_chunk
        self._chunks: dict[NodesLease, int] = {}
        """Ends of the chunks of the step that is being formed."""
        self._decoding: list[NodesLease] = []

    @property
    def tree(self) -> RadixTree:
        return self.cache.tree

    def serve(self, request: Request, pages: int, now: float) -> Any:
        raise AssertionError("requests begin and end step by step")

    # --- admission -----------------------------------------------------------------------------------------------------------

    def begin(self, request: Request, tokens: int, in_all: int, now: float) -> NodesLease | None:
        cache = self.cache
        lease = cast(NodesLease, cache.match(request, None, FIRST, tokens))
        pages = request.pages_for(tokens, self.page_tokens)
        if pages - lease.gpu_pages > self._free_pages - cache.loose_pages(lease) - self._asked:
            cache.refuse(lease)
            return None
        cache.admit(lease, pages, now)
        lease.hits = lease.gpu_pages, 0, 0
        return lease

    @property
    def _free_pages(self) -> int:
        """Pages that are free or can be evicted."""
        return self.cache.gpu.pool.free + self.cache.gpu.evictable_pages

    @property
    def _asked(self) -> int:
        """Pages that the chunks of the step take which is being formed."""
        return sum([self._lacks(lease, end) for lease, end in self._chunks.items()])

    def _lacks(self, lease: NodesLease, tokens: int) -> int:
        return -(-tokens // self.page_tokens) - -(-lease.tokens // self.page_tokens)

    def look_up_waiting(self, request: Request, tokens: int) -> bool:
        self.cache.refuse(self.cache.match(request, None, FIRST, tokens))
        return True

    # --- steps ---------------------------------------------------------------------------------------------------------------

    def step_tokens(self, tokens: int, *, is_answer: bool) -> int:
        """Prompts count in whole pages, and answers not at all unless they share steps with prompts."""
        return int(self._mixed_chunk) * tokens if is_answer else -(-tokens // self.page_tokens) * self.page_tokens

    def begin_chunk(self, lease: Any, tokens: int) -> bool:
        if tokens <= lease.tokens:
            return True
        if self._lacks(lease, tokens) > self._free_pages - self._asked:
            return False
        self._chunks[lease] = tokens
        return True

    def decode(self, lease: Any, tokens: int) -> bool:
        if tokens <= lease.tokens:
            return True
        begun = sum([not one.tokens % self.page_tokens for one in [*self._decoding, lease]])
        if begun > self._free_pages:
            return False
        self._decoding.append(lease)
        return True

    def end_pass(self, *, is_step: bool) -> None:
        chunks, decoding = self._chunks, self._decoding
        self._chunks, self._decoding = {}, []
        if chunks:
            self.cache.take_chunks(list(chunks.items()))
        if decoding and (not chunks or self._mixed_chunk) and self.cache.has_room(decoding):
            self.cache.take_tokens(decoding)

    def end_chunk(self, lease: Any, tokens: int) -> None:
        self._end_chunk_of(lease)
        self.cache.store(lease, tokens, self.cache.residency.now)

    def _end_chunk_of(self, lease: NodesLease) -> None:
        """Take the memory of a chunk now that ends in the step in which it has begun: nobody has seen a step between."""
        if lease in self._chunks:
            self.cache.take_chunks([(lease, self._chunks.pop(lease))])

    def grow(self, lease: Any, pages: int, full_pages: int) -> bool:
        """Take pages for an answer, of which no steps were seen."""
        self._end_chunk_of(lease)
        request = lease.request
        tokens = min(pages * self.page_tokens, request.prompt_tokens + max(request.output_tokens, 1) - 1)
        lacks = self._lacks(lease, tokens)
        if not self.cache.make_room(lacks):
            return False
        self.cache.hold((lease,), max(0, tokens - lease.tokens))
        return True

    # --- the end -------------------------------------------------------------------------------------------------------------

    def preempt(self, lease: Any) -> bool:
        """Take everything back; what the tree has of the prompt stays there until it is evicted."""
        self._forget(lease)
        self.cache.release(lease, LOST)
        return True

    def finish_request(self, lease: Any) -> None:
        self._end_chunk_of(lease)
        self._forget(lease)
        self.cache.finish(lease, self.cache.residency.now)

    def _forget(self, lease: NodesLease) -> None:
        self._chunks.pop(lease, None)
        self._decoding = [one for one in self._decoding if one is not lease]

    def held_extents(self) -> list[Extent]:
        return self.cache.held_extents()

    def verify(self) -> None:
        self.cache.check()
