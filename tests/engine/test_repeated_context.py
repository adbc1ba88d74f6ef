"""Context that several decoding requests have in common."""

from typing import Any

import pytest
from simpy import Event

from kvsim.core.transfer import Transfer
from kvsim.engine.substrate import Work
from kvsim.hardware.curves import ComputeCurves
from kvsim.substrate.simulated.substrate import SimulatedSubstrate
from tests.engine.small import MODEL, PAGE_TOKENS, SmallEngine, ask, small_engine

LAYER_BYTES = MODEL.kv_bytes_per_token / MODEL.layers
CURVES = {
    "linear": [[1, 1e30]],
    "prefill_attention": [[1, 1, 1e30]],
    "decode_attention": [[LAYER_BYTES, LAYER_BYTES * MODEL.layers], [1e9 * LAYER_BYTES, LAYER_BYTES * MODEL.layers]],
}
"""Each token of context takes a second, nothing else takes time."""


class Watched(SimulatedSubstrate):
    """Remembers the repeated context of decode steps, in tokens, by their number of requests."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.seen: dict[int, int] = {}

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        done = super().compute(work, loads)
        if work.decode_requests:
            self.seen[work.decode_requests] = work.repeated_context_tokens
        return done


def engine_with(share: float) -> SmallEngine:
    curves = ComputeCurves(**CURVES, repeated_context_share=share)
    return small_engine(gpu=40, hardware={"compute_curves": curves}, make_substrate=Watched)


@pytest.mark.parametrize(
    ("share", "pages"), [(0.5, {3: 4, 2: 1}), (1.0, {3: 0, 2: 0})], ids=["half of its time", "no difference"]
)
def test_common_pages_are_repeated_in_all_requests_but_the_first(share: float, pages: dict[int, int]) -> None:
    """All prompts begin with page a, two with abc: b and c are repeated once, a twice, and once after the answer of the second.
    They are counted only if that makes a difference."""
    engine = engine_with(share)
    engine.serve(ask("abcd", output=4), ask("abce", output=2), ask("ax", output=4))
    assert isinstance(engine.substrate, Watched)
    assert engine.substrate.seen == {requests: count * PAGE_TOKENS for requests, count in pages.items()}


def test_requests_with_a_common_prompt_decode_faster() -> None:
    """The second tokens of two prompts with three pages in common: at no cost, these save the time of as many tokens."""
    times = []
    for share in (1.0, 0.0):
        engine = engine_with(share)
        outcome = engine.serve(ask("abcd", output=2), ask("abce", output=2))
        times.append(outcome.e2e_s - outcome.ttft_s)
    assert (times[0] - times[1]).tolist() == pytest.approx([3 * PAGE_TOKENS] * 2)
