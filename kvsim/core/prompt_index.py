"""Whose prompts contain a page: which waiting requests may find something else in a cache once a page has come or gone."""

from typing import Any

from sortedcontainers import SortedDict

from kvsim.pages.extents import Extent


class Prompt:
    """The prompt of a request that waits."""

    __slots__ = ("extents", "is_current")

    def __init__(self) -> None:
        self.extents: tuple[Extent, ...] = ()
        """The pages that a cache has looked up, normalised."""
        self.is_current = False
        """Whether the cache still has of it what it had when it was last looked up."""


Changed = list[Prompt]


class PromptIndex:
    """Finds the prompts that contain a page, among those that have been looked up.

    An extent begins at the same page in all prompts that share it, so prompts are grouped by the first page of each of their
    extents, then by the extent's end. A page is in the extents of the last group that does not begin after it, if these do not
    end before it.
    """

    def __init__(self) -> None:
        self._groups: Any = SortedDict()
        """By first page, then by end: the prompts, each with the list of changed prompts that it is put into."""

    def add(self, prompt: Prompt, changed: Changed) -> None:
        """Put ``prompt`` into ``changed`` whenever what the cache has of it may have changed, and is no longer current."""
        groups = self._groups
        for start, pages in prompt.extents:
            ends = groups.get(start)
            if ends is None:
                ends = groups[start] = {}
            group = ends.get(start + pages)
            if group is None:
                group = ends[start + pages] = {}
            group[prompt] = changed

    def remove(self, prompt: Prompt) -> None:
        """Take out a prompt that has been added."""
        groups = self._groups
        for start, pages in prompt.extents:
            ends = groups[start]
            group = ends[start + pages]
            del group[prompt]
            if not group:
                del ends[start + pages]
                if not ends:
                    del groups[start]

    def changed(self, extents: tuple[Extent, ...]) -> None:
        """Take note that consecutive pages of a path come, go or move: all prompts that contain the first page may be concerned.

        A prompt that does not contain it contains none of those after it.
        """
        start, groups = extents[0][0], self._groups
        at = groups.bisect_right(start) - 1
        if at >= 0:
            for end, group in groups.peekitem(at)[1].items():
                if end > start:
                    self._mark(group)

    def all_changed(self) -> None:
        """Take note that any page may have come or gone."""
        for ends in self._groups.values():
            for group in ends.values():
                self._mark(group)

    @staticmethod
    def _mark(group: dict[Prompt, Changed]) -> None:
        for prompt, changed in group.items():
            if prompt.is_current:
                prompt.is_current = False
                changed.append(prompt)
