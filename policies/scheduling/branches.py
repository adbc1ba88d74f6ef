"""A prefix tree of waiting requests. It has no references upward, so it is freed at once although a run collects no garbage."""

from kvsim.core.queue_view import Waiting
from kvsim.pages.extents import Extent


class Branch:
    """Consecutive pages of prompts, and what continues them."""

    __slots__ = ("children", "ending", "pages", "start", "weight")

    def __init__(self, start: int, pages: int) -> None:
        self.start = start
        """Id of the first page."""
        self.pages = pages
        self.children: dict[int, Branch] = {}
        """By the id of their first page."""
        self.ending: list[Waiting] = []
        """Requests whose path ends with this branch."""
        self.weight = 0
        """Number of paths that end with this branch or below it."""

    def add(self, extents: tuple[Extent, ...]) -> "Branch":
        """Add a path below this branch, and return the branch that it ends with."""
        end = self
        end.weight += 1
        for start, pages in extents:
            while pages:
                child = end.children.get(start)
                if child is None:
                    child = Branch(start, pages)
                elif child.pages > pages:
                    child = child.cut(pages)
                end.children[start] = child
                child.weight += 1
                start += child.pages
                pages -= child.pages
                end = child
        return end

    def cut(self, pages: int) -> "Branch":
        """Cut the branch after ``pages`` pages. Returns the upper part; the branch itself becomes the lower one."""
        upper = Branch(self.start, pages)
        upper.weight = self.weight
        self.start += pages
        self.pages -= pages
        upper.children[self.start] = self
        return upper

    def shared_pages(self, extents: tuple[Extent, ...]) -> int:
        """Return how many leading pages of a path are below this branch."""
        shared, end = 0, self
        for start, pages in extents:
            while pages:
                child = end.children.get(start)
                if child is None:
                    return shared
                agreed = min(child.pages, pages)
                shared += agreed
                if agreed < child.pages:
                    return shared
                start += agreed
                pages -= agreed
                end = child
        return shared
