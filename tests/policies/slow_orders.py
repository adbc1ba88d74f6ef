"""The order of waiting requests from nothing but what is cached of each: obvious and slow, page by page.

``line`` is the order of the last round, with new requests at the end; ``found`` are (pages on the GPU, cached tokens).
"""

from collections.abc import Callable

from kvsim.core.queue_view import Waiting
from kvsim.policies.scheduling.base import SchedulingPolicy
from kvsim.policies.scheduling.dfs_weight import DfsWeight
from kvsim.policies.scheduling.longest_prefix import LongestPrefix
from kvsim.policies.scheduling.prefixes import PrefixScheduling
from kvsim.policies.scheduling.shortest_prefill import ShortestPrefill
from tests.workloads import pages_of

Line = list[Waiting]
Found = dict[Waiting, tuple[int, int]]


def duplicates(policy: PrefixScheduling, line: Line, found: Found, page_tokens: int) -> Line:
    """Of those with little cached, the ones that share enough with one before them that is no duplicate."""
    first, late = list[list[int]](), Line()
    for one in line:
        if policy.in_batch_duplicates == "equal" or found[one][0] * page_tokens > policy.check_up_to_tokens:
            continue
        pages = pages_of(one.request.runs)
        shared = max((sum(a == b for a, b in zip(pages, other, strict=False)) for other in first), default=0)
        if shared * page_tokens >= policy.shared_tokens:
            late.append(one)
        else:
            first.append(pages)
    return late


def longest_prefix(policy: LongestPrefix, line: Line, found: Found, page_tokens: int) -> Line:
    late = duplicates(policy, line, found, page_tokens)
    return sorted([one for one in line if one not in late], key=lambda one: -found[one][1]) + late


def shortest_prefill(policy: ShortestPrefill, line: Line, found: Found, page_tokens: int) -> Line:
    late = duplicates(policy, line, found, page_tokens)
    return sorted(line, key=lambda one: (one in late, max(1, one.target_tokens - found[one][1]), one.entry))


def dfs_weight(_policy: DfsWeight, line: Line, found: Found, _page_tokens: int) -> Line:
    paths = {one: pages_of(one.request.runs)[: found[one][0]] for one in line}

    def below(depth: int, members: Line) -> Line:
        """Those whose paths share their first ``depth`` pages, in order."""
        children: dict[int, Line] = {}
        for one in members:
            if len(paths[one]) > depth:
                children.setdefault(paths[one][depth], []).append(one)
        order = Line()
        for child in sorted(children.values(), key=lambda child: -len(child)):
            order += below(depth + 1, child)
        return order + [one for one in members if len(paths[one]) == depth]

    return below(0, line)


SLOW: dict[type[SchedulingPolicy], Callable[..., Line]] = {
    LongestPrefix: longest_prefix,
    ShortestPrefill: shortest_prefill,
    DfsWeight: dfs_weight,
}
