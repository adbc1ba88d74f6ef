"""Page ids, runs of them, and the three ways to get them: from tokens, from chained keys, from ids of any other kind.

A page id names a page together with everything before it, so equal ids mean equal prefixes. A run ``(start, pages)`` stands
for the consecutive ids ``start ... start + pages - 1`` along one path. Runs are normalised when none begins where the one
before it ends.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from struct import pack
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Run = tuple[int, int]

ExtraKey = int | str | bytes
"""What besides tokens may distinguish two prompts: the hash of an image, a LoRA adapter, a tenant."""

Span = tuple[int, int, ExtraKey]
"""Tokens ``start ... stop - 1`` stand for content (an image, a sound) whose hash is the third element."""


def count_pages(runs: Iterable[Run]) -> int:
    """Pages in all runs."""
    return sum([pages for _, pages in runs])


def append_run(runs: list[Run], start: int, pages: int) -> None:
    """Append a run in place, joined to the last one if it continues it."""
    if runs and runs[-1][0] + runs[-1][1] == start:
        runs[-1] = (runs[-1][0], runs[-1][1] + pages)
    else:
        runs.append((start, pages))


def split_runs(runs: tuple[Run, ...], pages: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The first ``pages`` pages, and the rest."""
    for i, (start, length) in enumerate(runs):
        if pages <= length:
            upper = (*runs[:i], (start, pages)) if pages else runs[:i]
            lower = ((start + pages, length - pages),) if pages < length else ()
            return upper, lower + runs[i + 1 :]
        pages -= length
    return runs, ()


def drop_last_pages(runs: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
    """All but the last ``pages`` pages, of which there are more."""
    at = len(runs) - 1
    while pages >= runs[at][1]:
        pages -= runs[at][1]
        at -= 1
    start, length = runs[at]
    return (*runs[:at], (start, length - pages))


def last_pages(runs: tuple[Run, ...], pages: int) -> tuple[Run, ...]:
    """The last ``pages`` pages, of which there are as many; at least one."""
    at = len(runs) - 1
    while pages > runs[at][1]:
        pages -= runs[at][1]
        at -= 1
    start, length = runs[at]
    return ((start + length - pages, pages), *runs[at + 1 :])


def join_runs(first: tuple[Run, ...], second: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs of a path and of what follows on it."""
    start, pages = first[-1]
    if start + pages == second[0][0]:
        return (*first[:-1], (start, pages + second[0][1]), *second[1:])
    return first + second


class PageHasher:
    """Turns tokens into one 128-bit key per page; a key names the page and everything before it.

    The key of a page is the integer digest of a running XXH3-128 over all tokens up to the page's end, each as a
    little-endian 64-bit word. These are the keys that LightLLM gives its pages, so the two can share a store. Tokens lie in
    0 ... 2**63 - 1. What else tells two prompts apart enters the same stream as a frame: a word with the top bit set (field
    and type), the length, the content padded to whole words. No token has that bit, so no frame can pass for tokens:

        tenant, LoRA adapter    before the first page, hence in every key
        multimodal span         before the first token of every page it touches: where it starts, where it ends within
                                the page, its hash
        bigram                  once, in front of all else

    With ``bigram`` a position is the pair (token i, token i + 1), as draft models of the EAGLE kind see it: n tokens have
    n - 1 positions, and a page touches the spans of the one token that follows it, too.
    """

    def __init__(self, page_tokens: int, *, bigram: bool = False) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens must be at least 1, not {page_tokens}")
        self.page_tokens = page_tokens
        self.bigram = bigram

    def keys(
        self,
        tokens: npt.ArrayLike,
        *,
        spans: Iterable[Span] = (),
        lora: ExtraKey | None = None,
        tenant: ExtraKey | None = None,
        partial_tail: bool = False,
    ) -> list[int]:
        """The key of each full page and, with ``partial_tail``, of the unfinished page at the end.

        ``tokens`` is a list or tuple of integers, a NumPy array of any integer type, or a torch tensor in host memory;
        an array of 64-bit integers is read where it lies. Raises TypeError for anything but integers in one dimension,
        ValueError for negative tokens and for spans outside the prompt.
        """
        words = _token_words(tokens)
        frames = self._span_frames(spans, len(words))
        if self.bigram:
            words = np.stack((words[:-1], words[1:]), axis=1).ravel()
        width = self.page_tokens * (1 + self.bigram)
        full = len(words) - len(words) % width
        stream = xxhash.xxh3_128(self._opening(lora, tenant))
        keys = [_absorb(stream, frames.get(k), page) for k, page in enumerate(words[:full].reshape(-1, width))]
        if partial_tail and full < len(words):
            keys.append(_absorb(stream, frames.get(len(keys)), words[full:]))
        return keys

    def _opening(self, lora: ExtraKey | None, tenant: ExtraKey | None) -> bytes:
        """What precedes the first token; nothing for a plain prompt."""
        opening = _frame(_BIGRAM, b"") if self.bigram else b""
        if tenant is not None:
            opening += _frame(_TENANT, tenant)
        if lora is not None:
            opening += _frame(_LORA, lora)
        return opening

    def _span_frames(self, spans: Iterable[Span], tokens: int) -> dict[int, bytes]:
        """The frames of the spans that touch a page, in order of their start, by page."""
        frames: dict[int, bytes] = {}
        ahead = int(self.bigram)
        for start, stop, content in sorted(spans, key=lambda span: span[:2]):
            if not 0 <= start < stop <= tokens:
                raise ValueError(f"a span must lie within the prompt of {tokens} tokens, not at {start} ... {stop}")
            for page in range(max(start - ahead, 0) // self.page_tokens, (stop - 1) // self.page_tokens + 1):
                end = min(stop, (page + 1) * self.page_tokens + ahead)
                frames[page] = frames.get(page, b"") + _frame(_SPAN, content, pack("<QQ", start, end))
        return frames


TOKEN_RANGE = "tokens must lie in 0 ... 2**63 - 1"
_BIGRAM, _TENANT, _LORA, _SPAN = range(1, 5)


def _frame(field: int, content: ExtraKey, place: bytes = b"") -> bytes:
    """A frame of the key stream: tag, length, ``place`` and content, in whole words."""
    if isinstance(content, int):
        kind, data = 1, content.to_bytes(content.bit_length() // 8 + 1, "little", signed=True)
    elif isinstance(content, str):
        kind, data = 2, content.encode()
    else:
        kind, data = 3, bytes(content)
    data = place + data
    return pack("<QQ", 1 << 63 | field << 8 | kind, len(data)) + data + bytes(-len(data) % 8)


def _absorb(stream: Any, frames: bytes | None, page: npt.NDArray[np.int64]) -> int:
    """Feed a page and the frames before it to the stream; the page's key."""
    if frames:
        stream.update(frames)
    stream.update(page)
    key: int = stream.intdigest()
    return key


def _token_words(tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Tokens as contiguous little-endian 64-bit words; as they are, if that is what they are."""
    words = np.asarray(_packed(tokens) if isinstance(tokens, (list, tuple)) else tokens)
    if words.ndim != 1 or words.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers in one dimension, not {words.dtype} of shape {words.shape}")
    words = np.ascontiguousarray(words, dtype="<i8")
    if len(words) and words.min() < 0:
        raise ValueError(TOKEN_RANGE)
    return words


def _packed(tokens: Sequence[Any]) -> "array[int]":
    """A list as an array; unlike NumPy, this refuses floats, and it is three times as fast."""
    try:
        return array("q", tokens)
    except OverflowError:
        raise ValueError(TOKEN_RANGE) from None


class PageIndex:
    """Gives page ids to chained keys, in the order in which the keys are first seen.

    Keys must be chained: a key is looked up only behind the same key as ever. Then the known keys of a prompt are a prefix of
    it, and ids rise along it, so both the prefix and its runs are found by bisection, with a few look-ups per run.
    """

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    @property
    def pages(self) -> int:
        """Page ids handed out so far."""
        return len(self._ids)

    def keys(self) -> list[int]:
        """The key of each page id handed out so far."""
        return list(self._ids)

    def lookup(self, keys: Sequence[int]) -> tuple[Run, ...]:
        """The page ids of a prompt with these keys as normalised runs; keys not seen before get the next ids."""
        ids = self._ids
        known = bisect_left(keys, True, key=lambda key: key not in ids)
        runs: list[Run] = []
        done = 0
        while done < known:
            shift = ids[keys[done]] - done
            end = bisect_right(range(known), shift, lo=done, key=lambda i: ids[keys[i]] - i)
            runs.append((shift + done, end - done))
            done = end
        if known < len(keys):
            append_run(runs, len(ids), len(keys) - known)
            ids.update(zip(keys[known:], range(len(ids), len(ids) + len(keys) - known), strict=True))
        return tuple(runs)


class ChainIndex:
    """Gives page ids to sequences of foreign ids that do not name what precedes them, or do so only within a scope.

    Two sequences of one scope get equal page ids exactly as far as they are equal from their beginning; sequences of
    different scopes share nothing. New page ids are consecutive. All foreign ids and their order are allowed; the work grows
    with the runs that go in and come out, not with their pages.

    A segment is a stretch of a path in which both kinds of ids count up together. The page after a given one is the next of
    its segment, or it begins a segment that is found under (page id of the given one, foreign id).
    """

    def __init__(self) -> None:
        self.pages = 0
        """Page ids handed out so far."""
        self._branches: dict[tuple[int, int], list[int]] = {}

    def lookup(self, foreign: Iterable[Run], scope: int = 0) -> tuple[Run, ...]:
        """The page ids of a sequence of foreign ids, given in runs, as normalised runs; ``scope`` is 0 or more."""
        runs: list[Run] = []
        segment = [0, 0, -scope]  # foreign id of its first page, pages, page id of its first page
        depth = 0  # pages of the segment already passed; the root is an empty segment before id -scope
        for start, pages in foreign:
            while pages:
                if depth == segment[1] or segment[0] + depth != start:
                    segment, depth = self._branch(segment, depth, start, pages)
                step = min(pages, segment[1] - depth)
                append_run(runs, segment[2] + depth, step)
                depth, start, pages = depth + step, start + step, pages - step
        return tuple(runs)

    def _branch(self, segment: list[int], depth: int, start: int, pages: int) -> tuple[list[int], int]:
        """The segment, and the place in it, where foreign id ``start`` follows the first ``depth`` pages of ``segment``.

        If it never did, the ``pages`` ids from ``start`` on become known there, by a longer segment or a new one.
        """
        place = segment[2] + depth - 1, start
        known = self._branches.get(place)
        if known is not None:
            return known, 0
        first_page = self.pages
        self.pages += pages
        if 0 < depth == segment[1] and segment[0] + depth == start and segment[2] + depth == first_page:
            segment[1] += pages
            return segment, depth
        self._branches[place] = new = [start, pages, first_page]
        return new, 0
