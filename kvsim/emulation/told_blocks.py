"""What events tell of a page besides its id: its tokens, its hash, and the page before it."""

from array import array
from collections.abc import Iterator, Sequence, Set

from kvsim.kv_events.hashes import BlockHashing
from kvsim.pages.extents import Extent


class Block:
    """A page as events have it."""

    __slots__ = ("before", "digest", "salt", "session", "tokens")

    def __init__(self, before: int, digest: bytes, tokens: Sequence[int], salt: str | None) -> None:
        self.before = before
        """The page before it on its path; -1: none."""
        self.digest = digest
        self.tokens = array("q", tokens)
        self.salt = salt
        self.session: str | None = None
        """That of the last request that came with it."""


class Blocks:
    """The blocks of all pages that a cache may have, by their ids."""

    def __init__(self, page_tokens: int, hashing: BlockHashing) -> None:
        self.page_tokens = page_tokens
        self.hashing = hashing
        self._blocks: dict[int, Block] = {}
        self._kept: Set[int] = frozenset()

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, page: int) -> Block:
        return self._blocks[page]

    def told(self, page: int) -> int:
        """Return a page's hash as events have it."""
        return self.hashing.told(self._blocks[page].digest)

    def add(self, extents: Sequence[Extent], tokens: Sequence[int], salt: str | None, session: str | None) -> None:
        """Take in the pages of a request that arrives, of which ``tokens`` are the first tokens."""
        blocks, size, before = self._blocks, self.page_tokens, -1
        for at, page in enumerate(pages_of(extents)):
            block = blocks.get(page)
            if block is None:
                own = tokens[at * size : (at + 1) * size]
                parent = None if before < 0 else blocks[before].digest
                block = blocks[page] = Block(before, self.hashing.digest(parent, own, salt), own, salt)
            if session is not None:
                block.session = session
            before = page

    def ending_at(self, page: int, pages: int) -> list[int]:
        """Return so many pages of a path, the last of which is ``page``."""
        path = [page]
        while len(path) < pages:
            path.append(self._blocks[path[-1]].before)
        return path[::-1]

    def forget(self, kept: Set[int]) -> None:
        """Forget pages that matter neither now nor when pages were last forgotten: by then, no copy of them is under way."""
        for page in [page for page in self._blocks if page not in kept and page not in self._kept]:
            del self._blocks[page]
        self._kept = kept


def pages_of(extents: Sequence[Extent]) -> Iterator[int]:
    """Iterate over page ids, one by one."""
    for start, pages in extents:
        yield from range(start, start + pages)
