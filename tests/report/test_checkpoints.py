"""What a report says of recurrent states, by hand: pages of 64 tokens, prompts of blocks of one page and one token more."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvsim.api import Result, load_trace, replay, simulate
from kvsim.report.html import render
from tests.workloads import make_request, write_trace

STATE_BYTES = 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
"""Qwen3-Next: 36 layers, 32 heads of 128 x 128 in float32, and three inputs of 8,192 channels in two bytes."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def played(*prompts: list[int], settings: tuple[str, ...], command: Any = replay) -> Result:
    requests = [
        make_request(blocks, prompt_tokens=64 * len(blocks) + 1, output_tokens=1, arrival_s=float(at))
        for at, blocks in enumerate(prompts)
    ]
    write_trace(Path("trace.jsonl"), requests)
    trace = load_trace("mooncake", path="trace.jsonl", block_tokens=64, page_tokens=64)
    return command(trace, "model=qwen3_next_80b", *settings)


LAST = ("checkpoint=last", "tiers.gpu.capacity=100pages")


def test_every_figure_by_hand() -> None:
    """Two states have room. [1] and [1 2] are saved; [5] pushes [1]'s out; [1 3] finds KV of one page and no state; its own
    pushes [1 2]'s out, so that [1 2 4] finds two pages and none; [5 6] begins from [5]'s, unless that is gone by then."""
    result = played([1], [1, 2], [5], [1, 3], [1, 2, 4], settings=(*LAST, "tiers.gpu.states=2states"))
    assert result.hit_pages.sum(axis=1).tolist() == [0, 1, 0, 0, 0]
    assert result.record["checkpoints"] == {
        "saved": 5,
        "used": 1,
        "evicted": 3,
        "detached": 0,
        "no_room": 0,
        "bytes": 5 * STATE_BYTES,
        "tokens_lost_to_missing_state": (1 + 2) * 64,
    }


def test_a_state_that_is_saved_again_counts_again() -> None:
    """With room for one: [1], [2], [1] saved, two of them evicted; the second [1] finds its page and no state."""
    counts = played([1], [2], [1], settings=(*LAST, "tiers.gpu.states=1states")).record["checkpoints"]
    assert (counts["saved"], counts["evicted"], counts["tokens_lost_to_missing_state"]) == (3, 2, 64)


def test_states_that_became_detached_are_not_evicted() -> None:
    """The GPU holds three pages: [4 5 6] (and its partial page) pushes [1 2] out, whose state stays behind."""
    settings = ("checkpoint=last", "checkpoint.detached=true", "tiers.gpu.capacity=4pages", "tiers.gpu.states=9states")
    counts = played([1, 2], [4, 5, 6], settings=settings).record["checkpoints"]
    assert (counts["saved"], counts["detached"], counts["evicted"]) == (2, 1, 0)


def test_states_that_nothing_could_make_room_for_are_counted() -> None:
    """A state takes 50 pages of the shared room; nothing is left of it beside a prompt of two."""
    assert -(-STATE_BYTES // (64 * 24576)) == 50
    result = played([1, 2], [1, 2], settings=("checkpoint=last", "tiers.gpu.capacity=40pages"))
    assert result.record["checkpoints"]["saved"] == 0
    assert result.record["checkpoints"]["tokens_lost_to_missing_state"] == 128


def test_known_pages_stand_in_the_rows_of_their_requests() -> None:
    """The second prompt can never fit; the third finds the first one's page."""
    result = played(
        [1], list(range(10, 30)), [1, 2], settings=("checkpoint=last", "tiers.gpu.capacity=10pages", "tiers.gpu.states=2states")
    )
    assert result.outcome.known_pages is not None
    assert result.outcome.known_pages.tolist() == [0, 0, 1]


@pytest.mark.parametrize("command", [replay, simulate])
def test_the_page_draws_what_kv_alone_would_have_hit(command: Any) -> None:
    gpus = ("hardware.gpus=2",) if command is simulate else ()
    result = played([1], [1, 2], [5], [1, 3], settings=(*LAST, *gpus, "tiers.gpu.states=2states"), command=command)
    hits = result.record["timeline"]["hits"]
    assert hits["known_rate"] == pytest.approx([0, 64 / 129, 0, 64 / 129], abs=1e-6)
    assert hits["hit_rate"]["gpu"] == pytest.approx([0, 64 / 129, 0, 0], abs=1e-6)
    assert "KV in memory, with or without a state" in render(result.record)


def test_other_models_have_no_such_line() -> None:
    Path("trace.jsonl").write_text(json.dumps({"timestamp": 0, "input_length": 65, "output_length": 1, "hash_ids": [1]}))
    trace = load_trace("mooncake", path="trace.jsonl", block_tokens=64, page_tokens=64)
    record = replay(trace).record
    assert "known_rate" not in record["timeline"]["hits"]
    assert "with or without a state" not in render(record)
