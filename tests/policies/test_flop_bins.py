"""The bins of ``flop_aware``: the front against looking at all of them."""

from random import Random

from kvsim.core.tree import Node
from kvsim.policies.eviction.flop_bins import NEVER, Bin, Bins
from tests.core.small import small_cache


def slow_front(bins: Bins) -> list[int]:
    """Places of the bins whose head was used before the heads of all lower bins."""
    front, bound_s = [], NEVER
    for known in bins.filled:
        used_s = min(known.entries)[0]
        if used_s < bound_s:
            front.append(known.place)
            bound_s = used_s
    return front


def places(bins: list[Bin]) -> list[int]:
    return [known.place for known in bins]


def node() -> Node:
    return small_cache(gpu=1).tree.root


def test_the_front_is_that_of_looking_at_all_bins() -> None:
    """Entries come and go, what is left of a victim comes back below it, and the front is asked for now and then."""
    leaf = node()
    for seed in range(40):
        random, bins = Random(seed), Bins()
        for number in range(300):
            assert places(bins.front()) == slow_front(bins)
            for _ in range(random.randint(1, 3)):
                if not bins.filled or random.random() < 0.5:
                    bins.push(random.randrange(40), (random.randrange(30) / 2, number, leaf, 0))
                    continue
                victim = bins.front()[-1] if random.random() < 0.3 else random.choice(bins.filled)
                place, used_s = victim.place, victim.used_s
                bins.pop(victim)
                if random.random() < 0.5:
                    bins.push(random.randint(0, place), (used_s, number, leaf, 0))
        assert places(bins.filled) == sorted(set(places(bins.filled)))
        assert all(known.used_s == known.entries[0][0] == min(known.entries)[0] for known in bins.filled)


def test_what_is_left_of_a_victim_takes_its_place_in_the_front() -> None:
    leaf, bins = node(), Bins()
    for place, used_s in ((2, 9.0), (5, 4.0), (7, 6.0), (8, 1.0)):
        bins.push(place, (used_s, place, leaf, 0))
    assert places(bins.front()) == [2, 5, 8]
    bins.pop(bins.front()[1])
    bins.push(4, (4.0, 9, leaf, 0))
    assert places(bins.front()) == [2, 4, 8], "the head at 7 is still outdone"
    bins.pop(bins.front()[1])
    assert places(bins.front()) == [2, 7, 8]


def test_filled_bins_have_the_earliest_entry_as_their_head() -> None:
    leaf, bins = node(), Bins()
    bins.fill([(1, [(5.0, 1, leaf, 3), (2.0, 2, leaf, 1)]), (3, []), (4, [(1.0, 3, leaf, 0)])])
    assert places(bins.filled) == [1, 4] == places(bins.front())
    assert [(known.used_s, known.turn) for known in bins.filled] == [(2.0, 1), (1.0, 0)]


def test_a_head_that_turns_out_to_be_older_takes_its_place_in_the_front() -> None:
    """A leaf may count by an earlier use than it was entered with: that of a state that has come after it."""
    leaf, bins = node(), Bins()
    for place, used_s in ((2, 9.0), (5, 4.0), (7, 3.0), (8, 6.0)):
        bins.push(place, (used_s, place, leaf, 0))
    assert places(bins.front()) == [2, 5, 7]
    for place, used_s, front in ((8, 1.0, [2, 5, 7, 8]), (5, 2.0, [2, 5, 8]), (2, 0.5, [2])):
        changed = next(known for known in bins.filled if known.place == place)
        changed.entries[0] = (used_s, 9, leaf, 0)
        bins.note_lost(changed)
        assert places(bins.front()) == front == slow_front(bins)
