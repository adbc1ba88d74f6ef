"""Computes chained page keys from tokens."""

from array import array
from collections.abc import Iterable, Sequence
from struct import pack
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvsim.numbers import Whole, check_number

ExtraKey = int | str | bytes
"""Anything other than tokens that distinguishes two prompts: the hash of an image, a LoRA adapter, a tenant."""

Span = tuple[int, int, ExtraKey]
"""Start, stop and hash: tokens ``start ... stop - 1`` stand for content (an image, a sound) with this hash."""


class PageHasher:
    """Computes one 128-bit key per page; a key identifies the page and everything before it.

    The key of a page is the integer digest of a running XXH3-128 over all tokens up to the end of the page, each as a
    little-endian 64-bit word. LightLLM uses the same keys, so the two can share a store. Tokens must be in 0 ... 2**63 - 1.
    Whatever else distinguishes two prompts enters the same stream as a frame: a word with the top bit set (field and type),
    the length, and the content padded to whole words. No token has that bit, so a frame cannot be mistaken for tokens:

        tenant, LoRA adapter    before the first page, hence in every key
        multimodal span         before the first token of every page it touches: its start, its end within the page, its
                                hash
        bigram                  once, before everything else

    With ``bigram``, a position is the pair (token i, token i + 1), as EAGLE draft models see it: n tokens have n - 1
    positions, and a page is also affected by spans that contain the token after it.
    """

    def __init__(self, page_tokens: int, *, bigram: bool = False) -> None:
        check_number("page_tokens", Whole(1), page_tokens)
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
        """Return the key of each full page and, with ``partial_tail``, of the partial page at the end.

        ``tokens`` is a list or tuple of integers, a NumPy array of any integer type, or a torch tensor in host memory;
        an array of 64-bit integers is not copied. Raises TypeError unless ``tokens`` are integers in one dimension, and
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
        """Return the frames before the first token; empty for a plain prompt."""
        opening = _frame(_BIGRAM, b"") if self.bigram else b""
        if tenant is not None:
            opening += _frame(_TENANT, tenant)
        if lora is not None:
            opening += _frame(_LORA, lora)
        return opening

    def _span_frames(self, spans: Iterable[Span], tokens: int) -> dict[int, bytes]:
        """Return, by page, the frames of the spans that touch it, in order of their start."""
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
    """Return a frame of the key stream: tag, length, ``place`` and content, padded to whole words."""
    if isinstance(content, int):
        kind, data = 1, content.to_bytes(content.bit_length() // 8 + 1, "little", signed=True)
    elif isinstance(content, str):
        kind, data = 2, content.encode()
    else:
        kind, data = 3, bytes(content)
    data = place + data
    return pack("<QQ", 1 << 63 | field << 8 | kind, len(data)) + data + bytes(-len(data) % 8)


def _absorb(stream: Any, frames: bytes | None, page: npt.NDArray[np.int64]) -> int:
    """Feed a page and the frames before it to the stream, and return the page's key."""
    if frames:
        stream.update(frames)
    stream.update(page)
    key: int = stream.intdigest()
    return key


def _token_words(tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the tokens as contiguous little-endian 64-bit words, without a copy if they already are."""
    words = np.asarray(_packed(tokens) if isinstance(tokens, (list, tuple)) else tokens)
    if words.ndim != 1 or words.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers in one dimension, not {words.dtype} of shape {words.shape}")
    words = np.ascontiguousarray(words, dtype="<i8")
    if len(words) and words.min() < 0:
        raise ValueError(TOKEN_RANGE)
    return words


def _packed(tokens: Sequence[Any]) -> "array[int]":
    """Convert a list or tuple to an array; unlike NumPy, this rejects floats, and it is three times as fast."""
    try:
        return array("q", tokens)
    except OverflowError:
        raise ValueError(TOKEN_RANGE) from None
