"""An engine's tree, from its events."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsim.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvsim.shadow.live import ChainKeys
from kvsim.shadow.mirror import EngineTree
from tests.shadow.live import KEYS, keys_of
from tests.shadow.written import CLEARED, hash_of, removed, stored
from tests.workloads import EXAMPLES


@pytest.fixture
def tree() -> EngineTree:
    return EngineTree(KEYS)


def test_blocks_are_there_until_they_are_removed(tree: EngineTree) -> None:
    told = tree.store(stored("abc"))
    assert (told.parent, told.known, told.is_report) == (None, 0, False)
    assert tree.pages() == {"gpu": 3}
    tree.remove(removed("abc", "ab"))
    assert tree.pages() == {"gpu": 1}
    assert (tree.stored, tree.removed, tree.unknown_removed) == (3, 2, 0)
    tree.check()


def test_keys_are_those_of_the_tokens(tree: EngineTree) -> None:
    """Whatever the pieces: the keys are the chain keys of the tokens, as other sources would make them with the same salt."""
    tree.store(stored("ab"))
    told = tree.store(stored("abcd", 2))
    tokens = [ord(letter) for letter in "abcd" for _ in range(4)]
    assert told.blocks[-1].path() == list(keys_of(tokens, 4))


def test_keys_say_nothing_without_the_salt() -> None:
    one, other = (EngineTree(ChainKeys(salt)).store(stored("ab")).blocks[-1].path() for salt in (b"a", b"b"))
    random = EngineTree(ChainKeys()).store(stored("ab")).blocks[-1].path()
    assert not {*one} & {*other} and not {*one} & {*random}


def test_adapters_salts_and_images_have_keys_of_their_own() -> None:
    """They are in the engine's hashes, too, so each is told with hashes of its own."""
    about: list[dict] = [{}, {"lora_name": "l"}, {"lora_id": 1}, {"cache_salt": "s"}]
    about += [{"extra_keys": (("s",), None)}, {"extra_keys": (None, (7, 1))}]
    keys = {EngineTree(KEYS).store(stored("ab", **each)).blocks[-1].key for each in about}
    assert len(keys) == len(about)


def test_a_block_computed_again_is_removed_twice(tree: EngineTree) -> None:
    """vLLM computes the last block of a prompt again that it has as a whole."""
    tree.store(stored("ab"))
    assert tree.store(stored("ab", 1)).known == 1
    assert tree.pages() == {"gpu": 3}
    tree.remove(removed("ab"))
    assert tree.pages() == {"gpu": 2}
    tree.remove(removed("ab"))
    assert (tree.pages(), tree.unknown_removed) == ({"gpu": 1}, 0)
    tree.check()


def test_a_report_of_reused_blocks_is_no_copy(tree: EngineTree) -> None:
    tree.store(stored("abc"))
    assert tree.store(stored("ab")).is_report
    tree.remove(removed("ab"))
    assert tree.pages() == {"gpu": 2}


def test_media_and_groups_are_kept_apart(tree: EngineTree) -> None:
    """Offloaded blocks come without tokens; a block is known as long as it is anywhere."""
    tree.store(stored("ab"))
    path = tree.store(stored("ab")).blocks[-1].path()
    offloaded = tree.store(BlockStored((hash_of("ab"), hash_of("a"), hash_of("z")), None, (), 0, medium="CPU"))
    assert offloaded.blocks[0].path() == path
    assert [block.is_rooted for block in offloaded.blocks] == [True, True, False]
    tree.remove(removed("z", medium="CPU"))
    tree.store(stored("ab", group_idx=1, kv_cache_spec_kind="sliding_window"))
    assert tree.pages() == {"cpu, group 0": 2, "gpu, group 0": 2, "gpu, group 1": 2}
    tree.remove(removed("ab", "a"))
    told = tree.store(stored("ab"))
    assert (told.known, told.known_below, tree.unknown_parents) == (0, 2, 0)
    tree.remove(removed("ab", "a", medium="CPU"))
    tree.remove(removed("a", group_idx=1))
    tree.check()
    assert tree.pages() == {"gpu, group 0": 2, "gpu, group 1": 1}


def test_nonsense_is_counted(tree: EngineTree) -> None:
    told = tree.store(stored("abcd", 2))
    tree.remove(removed("z", "abc"))
    assert (tree.unknown_parents, tree.unknown_removed, tree.pages()) == (1, 1, {"gpu": 1})
    tree.store(stored("ab", medium="FLOPPY"))
    tree.remove(removed("ab", "a", medium="FLOPPY"))
    tree.check()
    assert list(tree.places) == [(0, "gpu")]
    assert not told.blocks[0].is_rooted
    assert tree.store(stored("abcde", 4)).blocks[0].path() == [
        *told.blocks[-1].path(),
        tree.store(stored("abcde", 4)).blocks[0].key,
    ]


def test_cleared_and_restarted_trees_are_empty_and_known(tree: EngineTree) -> None:
    tree.store(stored("ab"))
    tree.store(stored("ab", medium="CPU"))
    tree.clear(AllBlocksCleared(medium="CPU"))
    assert tree.pages() == {"gpu": 2}
    tree.lose(3)
    tree.clear(CLEARED)
    assert (tree.pages(), tree.is_known, tree.cleared, tree.lost_batches) == ({}, True, 2, 3)
    tree.check()


def test_after_a_gap_a_tree_is_known_once_all_has_been_told_again_or_replaced(tree: EngineTree) -> None:
    tree.store(stored("abc"))
    tree.lose(1)
    assert (tree.is_known, tree.stale) == (False, 3)
    tree.store(stored("ab"))
    tree.remove(removed("abc"))
    assert (tree.is_known, tree.stale) == (False, 0), "what was stored in the gap may still be there"
    tree.remove(removed("x"))
    assert tree.is_known
    tree.check()


def test_a_gap_before_the_first_event_leaves_the_tree_unknown(tree: EngineTree) -> None:
    tree.lose(1)
    assert not tree.is_known
    tree.store(stored("abc"))
    assert not tree.is_known


def test_a_very_long_chain_is_followed_and_forgotten(tree: EngineTree) -> None:
    last = None
    for number in range(30_000):
        tree.store(BlockStored((number,), last, (number,), 1))
        last = number
    assert len(tree.store(BlockStored((-1,), last, (0,), 1)).blocks[0].path()) == 30_001
    tree.restart()
    assert tree.blocks == 0


WORDS = st.text("ab", min_size=1, max_size=5)
MEDIA = st.sampled_from([None, "GPU", "CPU", "disk"])
GROUPS = st.sampled_from([None, 0, 1])
HASHES = st.one_of(st.integers(0, 3), st.binary(max_size=2))
PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 3))
EVENTS = st.one_of(
    st.builds(
        lambda word, of, medium, group: stored(word, min(of, len(word) - 1), medium=medium, group_idx=group),
        WORDS, st.integers(0, 3), MEDIA, GROUPS,
    ),
    st.builds(lambda words, medium, group: removed(*words, medium=medium, group_idx=group), st.lists(WORDS), MEDIA, GROUPS),
    st.builds(AllBlocksCleared, medium=st.one_of(st.none(), MEDIA)),
    st.builds(
        BlockStored,
        block_hashes=st.lists(HASHES, max_size=3).map(tuple),
        parent_block_hash=st.one_of(st.none(), HASHES),
        token_ids=st.lists(st.one_of(st.integers(-5, 2**64), PAIRS), max_size=6).map(tuple),
        block_size=st.integers(0, 3),
        medium=MEDIA,
        extra_keys=st.one_of(st.none(), st.lists(st.one_of(st.none(), st.tuples(st.text(max_size=2)))).map(tuple)),
    ),
    st.just("gap"),
)  # fmt: skip
"""Events of one engine, and any nonsense that can be written as one."""


class Slow:
    """Copies by group, medium and hash, counted one by one."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[int, str, object]] = Counter()
        self.unknown_removed = 0

    def take(self, event) -> None:  # type: ignore[no-untyped-def]
        tiers = {None: "gpu", "GPU": "gpu", "CPU": "cpu", "disk": "disk"}
        if isinstance(event, AllBlocksCleared):
            for place in [place for place in self.copies if event.medium is None or place[1] == tiers[event.medium]]:
                del self.copies[place]
            return
        places = [(event.group_idx or 0, tiers[event.medium], hash_) for hash_ in event.block_hashes]
        if isinstance(event, BlockRemoved):
            for place in places:
                self.unknown_removed += not self.copies[place]
                self.copies[place] = max(0, self.copies[place] - 1)
        else:
            is_report = event.parent_block_hash is None and all(self.copies[place] for place in places)
            for place in places:
                counts = place[1] == "gpu" and not is_report
                self.copies[place] = self.copies[place] + 1 if counts else 1


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=5 * EXAMPLES)
def test_any_stream_is_followed_as_a_slow_model_does(events: list) -> None:
    tree, slow = EngineTree(KEYS), Slow()
    for event in events:
        if event == "gap":
            tree.lose(1)
            continue
        slow.take(event)
        if isinstance(event, BlockStored):
            told = tree.store(event)
            assert len(told.blocks) == len(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            tree.remove(event)
        else:
            tree.clear(event)
        tree.check()
        held = {(*place, hash_): copies for place, here in tree.places.items() for hash_, copies in here.items()}
        assert held == +slow.copies
        assert tree.unknown_removed == slow.unknown_removed


@given(st.lists(EVENTS, max_size=30), st.integers(1, 4))
@settings(max_examples=EXAMPLES)
def test_forgetting_the_oldest_keeps_the_counts_right(events: list, most: int) -> None:
    tree = EngineTree(KEYS)
    for event in events:
        if isinstance(event, BlockStored):
            tree.store(event)
        if tree.blocks > most:
            tree.forget_oldest(tree.blocks - most)
        assert tree.blocks <= most
        tree.check()
