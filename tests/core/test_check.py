"""``check`` recounts a cache and fails, saying what is wrong, for every kind of damage."""

from collections.abc import Callable

import pytest

from kvsim.core.transfer import Transfer
from kvsim.core.tree import ABSENT, DOOMED, INCOMING, READY
from kvsim.policies.checkpoint.last import Last
from tests.core.small import SmallCache, now, only, small_cache
from tests.states.small_hybrid import hybrid, use


def two_tiers() -> SmallCache:
    """``abc`` and ``abd`` on the GPU and, written through, on the CPU: nodes ab, c and d."""
    cache = small_cache(gpu=8, cpu=8)
    cache.use("abc")
    cache.use("abd")
    cache.check()
    return cache


# --- nodes -----------------------------------------------------------------------------------------------------------


def looked_for_elsewhere(cache: SmallCache) -> None:
    cache.node("abc").runs = cache.node("abd").runs


def counts_a_page_more(cache: SmallCache) -> None:
    cache.node("abc").pages += 1


def deeper_than_its_parent_ends(cache: SmallCache) -> None:
    cache.node("abc").depth += 1


def on_no_tier(cache: SmallCache) -> None:
    cache.node("ab").children_in[:] = [1, 1]
    cache.node("abc").state = [ABSENT, ABSENT]


def counts_in_a_list_of_all(cache: SmallCache) -> None:
    cache.node("abc").children_in[0] += 1


def given_up(cache: SmallCache) -> None:
    cache.residency.doomed.add(cache.node("abc"))


def counts_a_copy_more(cache: SmallCache) -> None:
    cache.node("ab").copies += 1


def counts_a_child_more(cache: SmallCache) -> None:
    cache.node("ab").children_in[1] += 1


def on_the_gpu_without_its_parent(cache: SmallCache) -> None:
    cache.node("ab").set_state(0, ABSENT)
    cache.node("ab").copies -= 1


def pinned_without_a_user(cache: SmallCache) -> None:
    cache.node("abc").pins[1] += 1


# --- slots and sums --------------------------------------------------------------------------------------------------


def lost_a_slot(cache: SmallCache) -> None:
    cache.gpu.pool.free -= 1


def has_a_slot_of_another(cache: SmallCache) -> None:
    cache.node("abc").slots[0] = cache.node("abd").slots[0]


def has_more_slots_than_pages(cache: SmallCache) -> None:
    upper, lower = cache.node("ab"), cache.node("abc")
    both = cache.gpu.pool.join(upper.slots[0], lower.slots[0])
    upper.slots[0], lower.slots[0] = cache.gpu.pool.split(both, 1)


def usable_without_slots(cache: SmallCache) -> None:
    node = cache.node("abc")
    cache.gpu.pool.give(node.slots[0])
    node.slots[0] = None


def waits_for_nothing(cache: SmallCache) -> None:
    cache.node("abc").set_state(0, INCOMING)


def believes_that_more_can_leave(cache: SmallCache) -> None:
    cache.gpu.evictable_pages += 1


def believes_that_more_is_leaving(cache: SmallCache) -> None:
    cache.gpu.leaving_pages += 1


def believes_that_more_is_reserved(cache: SmallCache) -> None:
    cache.tiers[1].reserved_pages += 1


def believes_that_more_is_there(cache: SmallCache) -> None:
    cache.tiers[1].inserted_pages += 1


def forgot_a_victim(cache: SmallCache) -> None:
    cache.edges[0].leaving.append(cache.node("abc"))


DAMAGES: list[tuple[Callable[[SmallCache], None], str]] = [
    (looked_for_elsewhere, "not found under its parent"),
    (counts_a_page_more, "page count"),
    (deeper_than_its_parent_ends, "depth"),
    (on_no_tier, "in the tree, but in no tier"),
    (counts_in_a_list_of_all, r"children were counted for all nodes that have none: \[1, 0\]"),
    (given_up, "in the tree, but doomed"),
    (counts_a_copy_more, "3 copies"),
    (counts_a_child_more, "children in cpu"),
    (on_the_gpu_without_its_parent, "on gpu without its parent"),
    (pinned_without_a_user, "pins in cpu"),
    (lost_a_slot, "gpu: slots leaked"),
    (has_a_slot_of_another, "gpu: a slot has two owners"),
    (has_more_slots_than_pages, "slots in gpu"),
    (usable_without_slots, "has no slots in gpu, but is not incoming"),
    (waits_for_nothing, "incoming in gpu, but not pinned"),
    (believes_that_more_can_leave, "gpu: running sums .*'evictable': 5.*, recounted .*'evictable': 4"),
    (believes_that_more_is_leaving, "gpu: running sums .*'leaving': 1.*, recounted .*'leaving': 0"),
    (believes_that_more_is_reserved, "cpu: running sums .*'reserved': 1.*, recounted .*'reserved': 0"),
    (believes_that_more_is_there, "cpu: running sums .*'held': 5.*, recounted .*'held': 4"),
    (forgot_a_victim, "victims of an eviction pass were left behind"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_cache_does_not_pass(damage: Callable[[SmallCache], None], message: str) -> None:
    cache = two_tiers()
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check()


# --- transfers -------------------------------------------------------------------------------------------------------


def ended(cache: SmallCache, transfer: Transfer) -> None:
    transfer.done = True


def unknown_to_its_node(cache: SmallCache, transfer: Transfer) -> None:
    transfer.nodes[0].transfers = ()


def copied_to_no_slots(cache: SmallCache, transfer: Transfer) -> None:
    cache.reset()
    (node,) = transfer.nodes
    assert node.state[1] == DOOMED
    cache.tiers[1].pool.give(node.slots[1])
    node.slots[1] = node.slots[1][:0]


def usable_before_it_arrived(cache: SmallCache, transfer: Transfer) -> None:
    transfer.nodes[0].set_state(1, READY)
    cache.tiers[1].inserted_pages += 3


def without_a_source(cache: SmallCache, transfer: Transfer) -> None:
    (node,) = transfer.nodes
    cache.gpu.pool.give(node.slots[0])
    node.state[0], node.slots[0] = ABSENT, None
    node.copies -= 1
    cache.gpu.evicted_pages += 3


TRANSFERS: list[tuple[Callable[[SmallCache, Transfer], None], str]] = [
    (ended, "an ended transfer is still listed"),
    (unknown_to_its_node, "does not list its transfer"),
    (copied_to_no_slots, "wrong slot count in cpu"),
    (usable_before_it_arrived, "not incoming in cpu while its transfer is under way"),
    (without_a_source, "its source in gpu is gone"),
]


@pytest.mark.parametrize(("damage", "message"), TRANSFERS, ids=[damage.__name__ for damage, _ in TRANSFERS])
def test_a_damaged_transfer_does_not_pass(damage: Callable[[SmallCache, Transfer], None], message: str) -> None:
    """The write-down of ``abc``, which has begun."""
    cache = small_cache(gpu=8, cpu=8)
    write_down = only(cache.insert(cache.admitted("abc"), now(cache)))
    assert cache.begin(write_down, now(cache)).can_run
    cache.check()
    damage(cache, write_down)
    with pytest.raises(AssertionError, match=message):
        cache.check()


# --- requests --------------------------------------------------------------------------------------------------------


def test_a_pin_that_a_request_lost_is_noticed() -> None:
    cache = two_tiers()
    lease = cache.run("abc")
    cache.residency.unpin(lease.node, cache.gpu)
    with pytest.raises(AssertionError, match="pins in gpu"):
        cache.check()


def test_slots_that_a_request_lost_are_noticed() -> None:
    cache = two_tiers()
    lease = cache.run("abc", pages=5)
    lease.slots = lease.slots[:1]
    with pytest.raises(AssertionError, match="gpu: slots leaked"):
        cache.check()


def test_slots_reserved_for_a_request_are_part_of_the_sums() -> None:
    cache = two_tiers()
    lease = cache.look("wxyz")
    assert cache.admit(lease, 4, now(cache))
    lease.reserved_pages += 1
    with pytest.raises(AssertionError, match=r"gpu: running sums .*'reserved': \d+.*, recounted"):
        cache.check()


# --- states ----------------------------------------------------------------------------------------------------------


def test_more_states_evicted_than_saved_are_noticed() -> None:
    cache = hybrid(Last())
    use(cache, "abc")
    cache.states._arrived += 2
    with pytest.raises(AssertionError, match="2 states evicted, but 1 saved"):
        cache.check()


def test_the_tiers_of_states_are_checked_too() -> None:
    cache = hybrid(Last())
    use(cache, "abc")
    cache.states.gpu.pool.free -= 1
    with pytest.raises(AssertionError, match="gpu: slots leaked"):
        cache.check()
