"""What routers without reports believe, by hand and against a model that goes page by page."""

from random import Random

import pytest

from kvsim.policies.routing.sent_prompts import SentPrompts
from tests.workloads import EXAMPLES


def test_the_prompts_sent_longest_ago_are_forgotten_first_from_their_ends() -> None:
    sent = SentPrompts([0, 1], {0: 6, 1: 6})
    sent.add(((0, 4),), 0, 0.0)
    sent.add(((0, 2), (10, 2)), 0, 1.0)
    assert sent.pages(0) == 6
    assert sent.matches(((0, 4),), 1.0) == {0: 4}
    sent.add(((20, 1),), 0, 2.0)
    assert sent.matches(((0, 4),), 2.0) == {0: 3}
    sent.add(((30, 2),), 0, 3.0)
    assert (sent.matches(((0, 4),), 3.0), sent.matches(((0, 2), (10, 2)), 3.0)) == ({0: 2}, {0: 3})
    sent.add(((0, 4),), 1, 4.0)
    assert sent.matches(((0, 4),), 4.0) == {0: 2, 1: 4}
    sent.forget(0)
    assert (sent.pages(0), sent.matches(((0, 4),), 4.0)) == (0, {1: 4})


def test_a_prompt_too_long_for_an_engine_is_remembered_in_part() -> None:
    sent = SentPrompts([0], {0: 3})
    sent.add(((0, 2), (7, 5)), 0, 0.0)
    assert sent.matches(((0, 2), (7, 5)), 0.0) == {0: 3}
    sent.add((), 0, 0.0)
    assert sent.matches((), 0.0) == {}


def test_a_prompt_is_forgotten_when_its_time_is_over() -> None:
    sent = SentPrompts([0], {0: None}, ttl_s=10.0)
    sent.add(((0, 4),), 0, 0.0)
    sent.add(((0, 2), (8, 1)), 0, 6.0)
    assert sent.matches(((0, 4),), 9.9) == {0: 4}
    assert sent.matches(((0, 4),), 10.0) == {0: 2}
    assert sent.matches(((0, 4),), 16.0) == {}
    assert sent.pages(0) == 0


class PageByPage:
    """Each page, by the last time at which a prompt with it was sent; of equals, the deepest one leaves first."""

    def __init__(self, most: int, ttl_s: float) -> None:
        self.most, self.ttl_s = most, ttl_s
        self.last: dict[str, tuple[int, float]] = {}
        self.sent = 0

    def add(self, word: str, now: float) -> None:
        self.expire(now)
        self.sent += 1
        for end in range(1, min(len(word), self.most) + 1):
            self.last[word[:end]] = self.sent, now
        while len(self.last) > self.most:
            del self.last[min(self.last, key=lambda path: (self.last[path][0], -len(path)))]

    def expire(self, now: float) -> None:
        self.last = {path: at for path, at in self.last.items() if at[1] + self.ttl_s > now}

    def match(self, word: str) -> int:
        found = 0
        while found < len(word) and word[: found + 1] in self.last:
            found += 1
        return found


@pytest.mark.parametrize("seed", range(EXAMPLES // 2))
def test_the_pages_are_those_of_the_model(seed: int) -> None:
    random = Random(seed)
    ids: dict[str, int] = {}
    most, ttl_s = random.choice([1, 3, 6, 10]), random.choice([5.0, 30.0, 1e9])
    sent, models = SentPrompts([0, 1], {0: most, 1: most}, ttl_s), [PageByPage(most, ttl_s) for _ in range(2)]
    for now in range(80):
        word = "".join(random.choice("ab") for _ in range(random.randint(1, 7)))
        extents = tuple((ids.setdefault(word[:end], 2 * len(ids)), 1) for end in range(1, len(word) + 1))
        expected = {}
        for engine, model in enumerate(models):
            model.expire(now)
            if found := model.match(word):
                expected[engine] = found
        assert sent.matches(extents, now) == expected
        engine = random.randrange(2)
        sent.add(extents, engine, now)
        models[engine].add(word, now)
        assert sent.pages(engine) == len(models[engine].last)
