"""Waiting queues small enough to follow by hand: prompts are words, a page of 16 tokens for each letter."""

from typing import Any

from kvsim.engine.job import Job
from kvsim.engine.queues import queue_for
from kvsim.policies.context import PolicyContext
from kvsim.policies.scheduling.base import SchedulingPolicy
from tests.core.small import small_cache

PAGE_TOKENS = 16


class SmallQueue:
    """A queue in front of a cache that holds some prompts."""

    def __init__(
        self, policy: SchedulingPolicy, *cached: str, gpu: int | None = None, cpu: int = 0, has_index: bool = True
    ) -> None:
        """Without an index, the cache does not tell whose prompts have more or less of their pages in it."""
        self.cache = small_cache(gpu=gpu, cpu=cpu, page_tokens=PAGE_TOKENS, slots=False)
        for word in cached:
            self.cache.use(word)
        self.cache.core.finds_by_pages = has_index
        policy.bind(PolicyContext(page_tokens=PAGE_TOKENS))
        self.queue = queue_for(policy, self.cache.core, self.cache.core.gpu)
        self.words: dict[tuple[int, int], str] = {}

    def wait(self, *words: str, at: float = 0.0, **about: Any) -> list[Job]:
        """Requests begin to wait, in this order."""
        jobs = []
        for word in words:
            job = Job(self.cache.request(word, index=len(self.words), **about), at)
            self.words[job.place] = word
            self.queue.push(job)
            jobs.append(job)
        return jobs

    def take(self, count: int, now: float = 0.0) -> list[Job]:
        """The first requests of a round, which wait no more."""
        self.queue.begin_round(now)
        taken = []
        for _ in range(count):
            job = self.queue.first()
            self.queue.remove(job)
            taken.append(job)
        return taken

    def order(self, now: float = 0.0) -> str:
        """The words of all that wait in the order of a round. Afterwards nothing waits."""
        return " ".join(self.words[job.place] for job in self.take(len(self.queue), now))


def small_queue(policy: SchedulingPolicy, cached: str = "", **about: Any) -> SmallQueue:
    return SmallQueue(policy, *cached.split(), **about)
