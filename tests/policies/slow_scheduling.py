"""The order of waiting requests, obvious and slow: prompts are words, a page for each letter; the cache is a list of words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(eq=False)
class SlowJob:
    """A waiting request. ``place`` is its number on arrival, ``entry`` counts the entries into the queue."""

    word: str
    place: int
    arrival_s: float
    priority: int
    entry: int
    generated: int = 0


@dataclass
class SlowQueue:
    """``jobs`` in the order of the last round, new ones at the end. Pages have ``page_tokens`` tokens."""

    page_tokens: int
    cached: list[str] = field(default_factory=list)
    jobs: list[SlowJob] = field(default_factory=list)

    def tokens(self, job: SlowJob) -> int:
        return len(job.word) * self.page_tokens + job.generated

    def cached_pages(self, job: SlowJob) -> int:
        return max((common(job.word, word) for word in self.cached), default=0)

    def cached_tokens(self, job: SlowJob) -> int:
        return self.cached_pages(job) * self.page_tokens

    def late(self, check_up_to_tokens: int = 32, shared_tokens: int = 32) -> list[SlowJob]:
        """In-batch duplicates: little of them is cached, and a job before them computes what they share."""
        first, late = list[SlowJob](), list[SlowJob]()
        for job in self.jobs:
            if self.cached_tokens(job) > check_up_to_tokens:
                continue
            shares = any(common(job.word, other.word) * self.page_tokens >= shared_tokens for other in first)
            (late if shares else first).append(job)
        return late

    # Each method puts ``jobs`` into the order of the policy of that name.

    def fcfs(self) -> None:
        self.jobs.sort(key=lambda job: job.place)

    def priority(self) -> None:
        self.jobs.sort(key=lambda job: (-job.priority, job.place))

    def shortest_prompt(self) -> None:
        self.jobs.sort(key=lambda job: (self.tokens(job), job.place))

    def shortest_prefill(self) -> None:
        late = self.late()
        self.jobs.sort(key=lambda job: (job in late, max(1, self.tokens(job) - self.cached_tokens(job)), job.entry))

    def longest_prefix(self) -> None:
        late = self.late()
        hits = [job for job in self.jobs if job not in late]
        self.jobs = sorted(hits, key=self.cached_tokens, reverse=True) + late

    def dfs_weight(self) -> None:
        self.jobs = self.branch("", self.jobs)

    def prism(self) -> None:
        def share(job: SlowJob) -> Fraction:
            ends = range(self.cached_pages(job) + 1, len(job.word) + 1)
            asking = [sum(common(other.word, job.word) >= end for other in self.jobs) for end in ends]
            return sum([Fraction(self.page_tokens, count) for count in asking], Fraction(job.generated))

        self.jobs = sorted(self.jobs, key=share)

    def branch(self, prefix: str, jobs: Sequence[SlowJob]) -> list[SlowJob]:
        """The jobs whose cached prefix begins with ``prefix``, in order."""
        children: dict[str, list[SlowJob]] = {}
        ending = list[SlowJob]()
        for job in jobs:
            found = job.word[: self.cached_pages(job)]
            if found == prefix:
                ending.append(job)
            else:
                children.setdefault(found[: len(prefix) + 1], []).append(job)
        order = list[SlowJob]()
        for child in sorted(children, key=lambda child: -len(children[child])):
            order += self.branch(child, children[child])
        return order + ending

    def overdue(self, now: float, max_wait_s: float | None) -> list[SlowJob]:
        """Jobs that have waited for too long, the one that arrived first at the front."""
        late = [job for job in self.jobs if max_wait_s is not None and now - job.arrival_s > max_wait_s]
        return sorted(late, key=lambda job: (job.arrival_s, job.place))


def common(one: Iterable[str], other: Iterable[str]) -> int:
    """Letters in which two words begin the same way."""
    count = 0
    for letter, other_letter in zip(one, other, strict=False):
        if letter != other_letter:
            break
        count += 1
    return count
