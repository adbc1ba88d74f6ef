"""Names of pages and recurrent states that are valid beyond a single run."""

from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from kvsim.states.store import STRIDE

KEY_BYTES = 16


class PageNames:
    """Keys and patterns of the page ids below ``pages``.

    With ``key``, a function that returns a page's 16-byte key, keys and patterns are the same in every run, so pages can be kept
    between runs. Without it there are no keys, and the pattern of a page is its id.

    A recurrent state is named by the page before it. Where states are saved in pages, the core numbers those below 0
    (``StateStore``).
    """

    def __init__(self, pages: int, key: Callable[[int], bytes] | None = None) -> None:
        self._keys: np.ndarray | None = None
        if key is not None:
            self._keys = np.frombuffer(b"".join(map(key, range(pages))), dtype=np.uint8).reshape(pages, KEY_BYTES)

    def keys(self, page_ids: np.ndarray) -> list[bytes]:
        """Return the key of each page, also of the pages of a state."""
        assert self._keys is not None
        joined = self._keys[np.maximum(page_ids, 0)].tobytes()
        keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
        for at in np.flatnonzero(page_ids < 0).tolist():
            name, unit = divmod(int(page_ids[at]), STRIDE)
            keys[at] = blake2b(self._keys[-1 - name].tobytes() + unit.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()
        return keys

    def patterns(self, page_ids: np.ndarray) -> np.ndarray:
        """Return the int64 number from which the words of each page are derived."""
        if self._keys is None:
            return page_ids
        return self._keys[page_ids, : KEY_BYTES // 2].copy().view("<i8").ravel()

    def state_patterns(self, pages: np.ndarray) -> np.ndarray:
        """Return such a number for the states after these pages, different from those of all pages."""
        return ~self.patterns(pages)
