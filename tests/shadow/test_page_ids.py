"""Page ids that can be forgotten."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvsim.pages.extents import Extent
from kvsim.shadow.page_ids import LivePageIndex
from kvsim.trace.page_index import PageIndex

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)


def keys_of(prompt: list[int]) -> list[tuple[int, ...]]:
    """Chained keys: each is the prompt up to its page."""
    return [tuple(prompt[: end + 1]) for end in range(len(prompt))]


def pages_of(extents: tuple[Extent, ...]) -> list[int]:
    return [start + at for start, pages in extents for at in range(pages)]


@given(PROMPTS)
def test_without_forgetting_ids_are_those_of_a_trace(prompts: list[list[int]]) -> None:
    live, of_trace = LivePageIndex(), PageIndex()
    for prompt in prompts:
        assert live.lookup(keys_of(prompt)) == of_trace.lookup(keys_of(prompt))
        live.check()


@given(PROMPTS, st.randoms(use_true_random=False))
def test_kept_pages_and_all_before_them_keep_their_ids_and_others_get_new_ones(prompts, random) -> None:
    live = LivePageIndex()
    ids: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        keys = keys_of(prompt)
        highest = max(ids.values(), default=-1)
        for key, page in zip(keys, pages_of(live.lookup(keys)), strict=True):
            assert ids.setdefault(key, page) == page
            assert page <= highest or page >= live.next_id - len(keys)
        if random.random() < 0.4:
            kept = [key for key in ids if random.random() < 0.3]
            known = {key[: end + 1] for key in kept for end in range(len(key))}
            forgotten = live.forget_all_but([(ids[key], 1) for key in kept])
            assert forgotten == len(ids) - len(known)
            ids = {key: page for key, page in ids.items() if key in known}
            assert live.pages == len(ids)
        live.check()


def test_a_prompt_that_was_forgotten_is_new() -> None:
    live = LivePageIndex()
    assert live.lookup("abc") == ((0, 3),)
    assert live.forget_all_but([(0, 1)]) == 2
    assert live.lookup("abc") == ((0, 1), (3, 2))
    assert live.forgotten == 2


@given(PROMPTS, st.integers(0, 40), st.integers(0, 40), st.integers(1, 5), st.randoms(use_true_random=False))
def test_keys_of_many_ids_are_those_of_each(prompts: list[list[int]], start: int, pages: int, up_to: int, random: Random) -> None:
    """Whether they are known, of one stretch or of several, or none."""
    live = LivePageIndex()
    extents = [extent for prompt in prompts for extent in live.lookup(keys_of(prompt))]
    live.forget_all_but(random.sample(extents, len(extents) // 2))
    assert live.keys_of(start, pages) == [live.key_of(page) for page in range(start, start + pages)]
    path = [start]
    while len(path) < up_to:
        path.append(live.before(path[-1]))
    assert live.keys_up_to(start, up_to) == [live.key_of(page) for page in path]
