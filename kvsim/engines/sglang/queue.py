"""The waiting queue of SGLang 0.5.23: first come first served, longest prefix match, or depth first through the tree."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from kvsim.core.tree import Node
from kvsim.engine.job import QUEUED, Job
from kvsim.engine.queue import JobQueue
from kvsim.engines.sglang.stepped import SteppedNodes
from kvsim.policies.scheduling.base import ARRIVAL, DEPTH, PREFIX, SchedulingPolicy

REFRESH_ROUNDS: Final = 32
REFRESHED: Final = 128
"""Every so many rounds, so many requests are looked up, so that what they will find is recent; only with LRU
(SGLANG_ENABLE_WAITING_PREFIX_REFRESH)."""
MOST_SORTED: Final = 128
"""Above this many waiting requests, lpm leaves the queue as it is."""
SHARED_TOKENS: Final = 32
"""In-batch caching: up to this many tokens found, and from this many shared on, a request is put back."""


def check_policy(policy: SchedulingPolicy) -> None:
    """Raise ValueError for a scheduling policy that SGLang does not have, or with settings that it does not have."""
    if policy.goes_by() not in (ARRIVAL, PREFIX, DEPTH):
        raise ValueError(
            f"scheduling: {type(policy).__name__}: SGLang's schedule is by arrival, by prefix or depth first: set "
            "scheduling=fcfs, scheduling=longest_prefix or scheduling=dfs_weight, or rules=default"
        )
    kind: Any = policy
    for field in fields(kind):
        value, expected = getattr(policy, field.name), field.default
        if value != expected:
            raise ValueError(
                f"scheduling.{field.name}={'null' if value is None else value} is not SGLang's, which is "
                f"{'null' if expected is None else expected}: leave it out, or set rules=default"
            )


class NodeQueue(JobQueue):
    """Jobs in the order in which they are tried. New ones, and those that were retracted, come last.

    ARRIVAL   stays as it is
    PREFIX    most tokens found first; of those that share their first tokens, and have little cached, all but one last
    DEPTH     depth first through the tree, branches with more waiting requests first

    A look-up is of all tokens so far, and refreshes what it finds.
    """

    def __init__(self, policy: SchedulingPolicy, cache: SteppedNodes) -> None:
        check_policy(policy)
        self._sorts_by_prefix = policy.goes_by() == PREFIX
        self._goes_by_depth = policy.goes_by() == DEPTH
        self._cache = cache
        self._jobs: list[Job] = []
        self._new: list[Job] = []
        """Those that have joined since the last call of ``take_new``."""
        self._rounds = 0
        """Rounds in which the order stayed as it was."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.copy())

    def push(self, job: Job) -> None:
        job.phase = QUEUED
        self._jobs.append(job)
        self._new.append(job)

    def take_new(self) -> list[Job]:
        """Return the jobs that have joined since the last call and are still here."""
        new, self._new = self._new, []
        return [job for job in new if job.phase == QUEUED]

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def order(self) -> None:
        """Put the jobs into their order, at the beginning of a round of admission."""
        jobs = self._jobs
        if not jobs:
            return
        if self._goes_by_depth:
            self._jobs = self._by_depth()
        elif self._sorts_by_prefix and len(jobs) <= MOST_SORTED:
            self._sort_by_prefix()
        elif self._cache.differs.refreshes_waiting and self._cache.gpu.eviction.orders_by_last_use():
            if self._rounds % REFRESH_ROUNDS == 0:
                for job in reversed(jobs[:REFRESHED]):
                    self._cache.find(job.request, job.target_tokens)
            self._rounds += 1

    def _sort_by_prefix(self) -> None:
        found: dict[Job, int] = {}
        heads = set[int]()
        for job in self._jobs:
            cached = self._cache.find(job.request, job.target_tokens)
            found[job] = min(cached.tokens, job.target_tokens - 1)
            if cached.gpu_tokens <= SHARED_TOKENS:
                head = self._cache.page_at(job.request, SHARED_TOKENS, job.target_tokens)
                if head in heads:
                    found[job] = -1
                elif head is not None:
                    heads.add(head)
        self._jobs.sort(key=lambda job: -found[job])

    def _by_depth(self) -> list[Job]:
        ending: dict[Node, list[Job]] = {}
        weights: dict[Node, int] = {}
        for job in self._jobs:
            end = self._cache.find(job.request, job.target_tokens).node
            ending.setdefault(end, []).append(job)
        for end, jobs in ending.items():
            node: Node | None = end
            while node is not None:
                weights[node] = weights.get(node, 0) + len(jobs)
                node = node.parent
        ordered: list[Job] = []
        stack = [self._cache.tree.root]
        while stack:  # in reverse: what ends with a node, then its children, lightest first
            node = stack.pop()
            ordered += reversed(ending.get(node, []))
            stack += sorted([child for child in node.children.values() if child in weights], key=lambda child: -weights[child])
        ordered.reverse()
        return ordered
