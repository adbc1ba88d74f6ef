"""Suggestions for misspelled names."""

from pathlib import Path

import pytest

from kvsim.suggest import closest, distance, hint, nearest

EVICTION = sorted(path.stem for path in (Path(__file__).resolve().parent.parent / "conf" / "eviction").glob("*.yaml"))


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [
        ("lru", "lru", 0),
        ("lur", "lru", 1),
        ("lr", "lru", 1),
        ("", "abc", 3),
        ("belaady", "belady", 1),
        ("ca", "abc", 3),
        ("xy", "yx", 1),
    ],
)
def test_the_distance_counts_edits_and_swaps(one: str, other: str, edits: int) -> None:
    assert distance(one, other) == distance(other, one) == edits


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("lur", "lru"), ("LRU", "lru"), ("s3fifo", "s3_fifo"), ("S3-FIFO", "s3_fifo"),
     ("tinylfu", "w_tinylfu"),
     ("workload", "workload_aware"), ("lenght_awre", "length_aware"), ("gdfs", "gdsf"), ("acr", "arc"), ("random_", "random")],
)  # fmt: skip
def test_a_short_or_long_typo_finds_its_policy(typed: str, meant: str) -> None:
    assert nearest(typed, EVICTION) == [meant]


def test_equally_close_names_are_all_suggested() -> None:
    assert closest("lu", ["arc", "lfu", "lru"]) == "; did you mean lfu or lru?"
    assert closest("rlu", EVICTION) == "; did you mean lru or rlt?"
    assert (
        closest("llama", ["llama3_405b", "llama3_70b", "llama3_08b", "llama3_03b", "tiny"])
        == "; did you mean llama3_405b, llama3_70b or llama3_08b?"
    )


@pytest.mark.parametrize("typed", ["zzz", "q", "nothing_alike", ""])
def test_a_name_unlike_all_others_gets_no_suggestion(typed: str) -> None:
    assert closest(typed, EVICTION) == ""
    assert closest(typed, []) == ""


@pytest.mark.parametrize(
    ("message", "expected"),
    [("tail must be one of full, all, not 'ful'", "; did you mean full?"),
     ("scope must be host or engine, not hots", "; did you mean host?"),
     ("print_tree must be false, true or each, not aech", "; did you mean each?"), ("seed must be 0 or more, not -1", ""),
     ("page_tokens must be at least 1, not 0", ""), ("stop must be one of never, always, not 17", "")],
)  # fmt: skip
def test_a_message_that_lists_the_choices_gets_a_hint(message: str, expected: str) -> None:
    assert hint(message) == expected
