"""The depth-first order of requests through a prefix tree of what they have on the GPU: kept up to date from round to round."""

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from kvsim.core.queue_view import LookUps, Waiting
from kvsim.pages.extents import Extent, split_extents
from kvsim.policies.scheduling.kept_order import KeptOrder

At = tuple[int, int]
"""Where a branch stands among the children of its parent: minus its weight, then what decides between equals."""

NOWHERE: Final[At] = (0, 0)
SPARE: Final = 64
"""A heap is built anew when it has this many entries more than twice those that count."""


class Member:
    """A waiting request and its path, the pages that it has on the GPU."""

    __slots__ = ("number", "pages", "path", "waiting")

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self.path: tuple[Extent, ...] = ()
        self.pages = -1
        """Those of the path; -1 until the first round."""
        self.number = 0
        """Where it stands among those whose paths end with the same branch; before the first round, among all new ones."""


class Branch:
    """Consecutive pages of paths, and what continues them. It has no references upward, so it is freed at once although a run
    collects no garbage."""

    __slots__ = ("arrived", "at", "children", "ending", "kept", "line", "members", "number", "pages", "start", "weight")

    def __init__(self, number: int, start: int, pages: int) -> None:
        self.number = number
        self.start = start
        """Id of the first page."""
        self.pages = pages
        self.children: dict[int, Branch] = {}
        """By the id of their first page."""
        self.line: list[tuple[At, int, Branch]] = []
        """A heap of children by where they stand; an entry no longer counts once that is elsewhere."""
        self.ending: list[tuple[int, Member]] = []
        """A heap of the requests whose path ends with this branch, by number."""
        self.members = 0
        """Number of paths that end with this branch or below it."""
        self.weight = 0
        """The same in the last round."""
        self.kept = 0
        """How many of the members are those of the last round."""
        self.at = NOWHERE
        """As of the last round."""
        self.arrived = 0
        """For a branch without members of the last round: numbers those that have members again."""

    def first_child(self) -> "Branch | None":
        """Return the child to go down first; None if no path goes on."""
        line = self.line
        while line:
            at, _, child = line[0]
            if child.members and child.at == at and self.children.get(child.start) is child:
                return child
            heappop(line)
        return None

    def first_ending(self) -> Member:
        """Return the first request whose path ends here; there is one."""
        while self.ending[0][1].number != self.ending[0][0]:
            heappop(self.ending)
        return self.ending[0][1]

    def enter(self, child: "Branch") -> None:
        """Let a child stand where it says."""
        heappush(self.line, (child.at, child.number, child))
        if len(self.line) > 2 * len(self.children) + SPARE:
            self.line = [(child.at, child.number, child) for child in self.children.values() if child.at != NOWHERE]
            heapify(self.line)

    def end(self, member: Member) -> None:
        """Let a path end here."""
        heappush(self.ending, (member.number, member))
        if len(self.ending) > 2 * self.members + SPARE:
            self.ending = list({entry[1]: entry for entry in self.ending if entry[1].number == entry[0]}.values())
            heapify(self.ending)


class DepthFirstOrder(KeptOrder):
    """Depth first: branches with more waiting requests first, what lies deeper before what ends earlier.

    Equals stay in the order of the last round, which for branches is that of their first requests; new ones come last.
    """

    def __init__(self) -> None:
        self._branches = 0
        self._root = self._branch(0, 0)
        self._members: dict[Waiting, Member] = {}
        self._new: OrderedDict[Waiting, Member] = OrderedDict()
        """Those that have not been through a round."""
        self._touched: dict[Branch, Branch] = {}
        """Branches that have more or less members than in the last round, each with its parent."""
        self._added = 0
        self._arrived = 0
        self._front = self._back = 0
        """Numbers of what was last put before, and after, all its equals."""

    def _branch(self, start: int, pages: int) -> Branch:
        self._branches += 1
        return Branch(self._branches, start, pages)

    def add(self, waiting: Waiting) -> None:
        self._members[waiting] = self._new[waiting] = member = Member(waiting)
        self._added += 1
        member.number = self._added

    def remove(self, waiting: Waiting) -> None:
        member = self._members.pop(waiting)
        if self._new.pop(waiting, None) is None:
            self._leave(member)

    def first(self) -> Waiting:
        branch = self._root
        if not branch.members:
            return next(iter(self._new))
        while (child := branch.first_child()) is not None:
            branch = child
        return branch.first_ending().waiting

    def in_order(self) -> list[Waiting]:
        ordered: list[Waiting] = []
        stack = [self._root]
        while stack:  # in reverse: what ends with a branch, then its children, those that come last first
            branch = stack.pop()
            ending = {member: number for number, member in branch.ending if member.number == number}
            ordered += [member.waiting for member in sorted(ending, key=lambda member: -member.number)]
            stack += sorted([child for child in branch.children.values() if child.members], key=lambda child: child.at)
        ordered.reverse()
        return [*ordered, *self._new]

    # --- a round -------------------------------------------------------------------------------------------------------------

    def update(self, changed: Sequence[Waiting], look_ups: LookUps) -> None:
        moved: list[tuple[list[tuple[int, int, int]], int, Member]] = []
        for waiting in changed:
            member, pages = self._members[waiting], look_ups.gpu_pages(waiting)
            if pages != member.pages:
                moved.append((self._position(member), pages, member))
        moved.sort(key=lambda entry: entry[0])
        for _, _, member in moved:
            if member.pages >= 0:
                self._leave(member)
        fallen: list[tuple[Branch, Member]] = []
        for _, pages, member in moved:
            before, member.pages = member.pages, pages
            member.path = split_extents(member.waiting.request.runs, pages)[0]
            end = self._join(member, before)
            if before > pages:
                fallen.append((end, member))
            else:
                self._back += 1
                member.number = self._back
                end.end(member)
        for end, member in reversed(fallen):  # it was deeper, and so before all that ended here
            self._front -= 1
            member.number = self._front
            end.end(member)
        self._new.clear()
        self._settle()

    def _position(self, member: Member) -> list[tuple[int, int, int]]:
        """Return what orders requests as in the last round: where each branch of their paths stands, then their number."""
        if member.pages < 0:
            return [(2, member.number, 0)]
        position: list[tuple[int, int, int]] = []
        for branch in self._along(member.path):
            position.append((0, *branch.at))
        position.append((1, member.number, 0))
        return position

    def _along(self, path: tuple[Extent, ...]) -> list[Branch]:
        """Return the branches of a path from the root's child down; a branch ends where the path does."""
        branches: list[Branch] = []
        branch = self._root
        for start, pages in path:
            while pages:
                branch = branch.children[start]
                branches.append(branch)
                start += branch.pages
                pages -= branch.pages
        return branches

    def _leave(self, member: Member) -> None:
        """Take a path out of the tree; branches without members stay until the next round is settled."""
        parent = self._root
        parent.members -= 1
        for branch in self._along(member.path):
            branch.members -= 1
            branch.kept -= 1
            self._touched[branch] = parent
            parent = branch
        member.number = 0

    def _join(self, member: Member, before: int) -> Branch:
        """Put a path into the tree whose first ``before`` pages were in it in the last round; -1: a new request.

        Returns the branch that it ends with. Paths join in the order of the last round.
        """
        branch, depth = self._root, 0
        branch.members += 1
        for start, pages in member.path:
            while pages:
                child = branch.children.get(start)
                if child is None:
                    child = branch.children[start] = self._branch(start, pages)
                elif child.pages > pages:
                    child = self._cut(branch, child, pages)
                if not child.members:
                    self._arrived += 1
                    child.arrived = self._arrived
                child.members += 1
                child.kept += before > depth
                self._touched[child] = branch
                start += child.pages
                pages -= child.pages
                depth += child.pages
                branch = child
        return branch

    def _cut(self, parent: Branch, branch: Branch, pages: int) -> Branch:
        """Cut a branch after ``pages`` pages. Returns the upper part; the branch itself becomes the lower one."""
        upper = self._branch(branch.start, pages)
        upper.members, upper.weight, upper.kept = branch.members, branch.weight, branch.kept
        upper.at, upper.arrived = branch.at, branch.arrived
        branch.start += pages
        branch.pages -= pages
        parent.children[upper.start] = upper
        upper.children[branch.start] = branch
        if branch.at != NOWHERE:
            parent.enter(upper)
            upper.enter(branch)
        if branch in self._touched:
            self._touched[branch] = upper
        return upper

    def _settle(self) -> None:
        """Put the children of each branch into their order: of equals, those of the last round keep theirs, new ones are last."""
        touched: dict[Branch, list[Branch]] = {}
        for branch, parent in self._touched.items():
            if branch.members:
                touched.setdefault(parent, []).append(branch)
            else:
                del parent.children[branch.start]
        self._touched.clear()
        for parent, branches in touched.items():
            self._settle_children(parent, branches)

    def _settle_children(self, parent: Branch, branches: list[Branch]) -> None:
        """Let those of the children stand elsewhere, among heavier or lighter ones, that have more or less members."""
        known = sorted([branch for branch in branches if branch.kept], key=lambda branch: branch.at)
        new = sorted([branch for branch in branches if not branch.kept], key=lambda branch: branch.arrived)
        for branch in reversed([branch for branch in known if branch.members < branch.weight]):
            self._front -= 1
            self._stand(parent, branch, self._front)
        for branch in [*[branch for branch in known if branch.members > branch.weight], *new]:
            self._back += 1
            self._stand(parent, branch, self._back)
        for branch in branches:
            branch.kept = branch.weight = branch.members

    @staticmethod
    def _stand(parent: Branch, branch: Branch, number: int) -> None:
        branch.at = (-branch.members, number)
        parent.enter(branch)
