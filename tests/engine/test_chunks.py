"""Pages that are found before the whole prompt is computed. See small.py for the round numbers: a page has 4 tokens."""

from dataclasses import replace
from typing import Any

from kvsim.core.request import Request, Reset
from kvsim.engine.outcome import Outcome
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from tests.cluster.small_cluster import Sent, small_cluster
from tests.core.small import Watched
from tests.engine.small import SmallEngine, ask, check_idle, hits, make_requests, seconds, small_engine

TWELVE = "abcdefghijkl"
EIGHT_PAGES = 32


def engine(**about: Any) -> SmallEngine:
    """A step computes eight pages at most."""
    return small_engine(**({"gpu": 40, "max_batch_tokens": EIGHT_PAGES} | about))


def played(served: SmallEngine, requests: list[Request]) -> Outcome:
    outcome = served.run(requests)
    check_idle(served)
    return outcome


def test_a_request_hits_the_eight_of_twelve_shared_pages_that_are_computed() -> None:
    """The first prompt has 49 tokens: 32 in the first step, 17 in the second, where 15 of the second prompt's 53 fit, from 32 on.

    Its other 6 follow.
    """
    outcome = engine().serve(ask(TWELVE), ask(TWELVE + "x", 1))
    assert [hits(outcome, index) for index in (0, 1)] == [(0, 0, 0), (8, 0, 0)]
    assert outcome.ttft_s.tolist() == seconds([32 + 32, 32 + 32 + 6 - 1])


def test_otherwise_pages_are_found_when_the_whole_prompt_is_computed() -> None:
    """The second prompt computes 15, 32 and 6 tokens. The third, in the last of these steps, finds all but a token."""
    outcome = engine(cache_chunks=False).serve(ask(TWELVE), ask(TWELVE + "x", 1), ask(TWELVE, 65))
    assert [hits(outcome, index) for index in (1, 2)] == [(0, 0, 0), (12, 0, 0)]
    assert outcome.ttft_s[:2].tolist() == seconds([64, 64 + 32 + (6 + 1) - 1])


def test_a_page_that_is_computed_in_part_is_not_found() -> None:
    outcome = engine(max_batch_tokens=31).serve(ask(TWELVE), ask(TWELVE, 1))
    assert hits(outcome, 1) == (7, 0, 0)


def test_what_two_requests_compute_at_once_is_stored_once() -> None:
    """Both compute the same pages: the first step has 8 of the first prompt and 3 of the second, which gives back its copies."""
    served = engine(max_batch_tokens=48)
    served.gpu.watches.append(watched := Watched())
    outcome = served.serve(ask(TWELVE[:8]), ask(TWELVE))
    assert hits(outcome, 1) == (0, 0, 0)
    assert outcome.tiers["gpu"].inserted_pages == len(watched.pages) == 12


def test_every_page_is_announced_once_and_chunks_of_a_prompt_are_one_node() -> None:
    served = engine(max_batch_tokens=9)
    served.gpu.watches.append(watched := Watched())
    outcome = served.serve(ask(TWELVE))
    (node,) = served.cache.tree.root.descendants()
    assert outcome.tiers["gpu"].inserted_pages == len(watched.pages) == node.pages == 12
    assert node.created == seconds(9) and node.last_used == seconds(49)


def test_a_preempted_request_finds_what_it_has_computed() -> None:
    """The first request has its first token at 5; then each step makes one more and computes 4 tokens of the second prompt.

    At 20 both pages of the first are full. The other 8 are the second one's, which is retracted with 3 of 7 pages computed. They
    stay while the first one makes its other 8 tokens alone, a second each. Then 17 of 29 tokens are left.
    """
    requests = ask("a", output=12), ask("bcdefgh")
    outcome = small_engine(gpu=10, max_batch_tokens=5).serve(*requests)
    assert outcome.retractions == 1 and hits(outcome, 1) == (0, 0, 0)
    assert outcome.ttft_s.tolist() == seconds([5, 28 + 17])
    outcome = small_engine(gpu=10, max_batch_tokens=5, cache_chunks=False).serve(*requests)
    assert outcome.ttft_s.tolist() == seconds([5, 28 + 29])


def test_a_prompt_is_copied_below_when_all_of_it_is_computed() -> None:
    """At 16, four pages are computed, and the second request finds two. Its 5 tokens and the first one's last take until 22."""
    outcome = engine(cpu=40, max_batch_tokens=8).serve(ask("abcd"), ask("abx", 9))
    assert [hits(outcome, index) for index in (0, 1)] == [(0, 0, 0), (2, 0, 0)]
    assert outcome.links["gpu-cpu"].intervals[:, 0].tolist() == seconds([22, 26])
    assert outcome.placement["written_pages"] == 5


def test_a_hit_of_a_chunk_counts_as_a_use() -> None:
    outcome = engine(cpu=40, placement=WriteThroughSelective).serve(ask(TWELVE), ask(TWELVE + "x", 1))
    assert outcome.placement["written_pages"] == 8


def test_nothing_is_found_of_a_prompt_that_a_reset_has_overtaken() -> None:
    requests = make_requests([ask(TWELVE), ask(TWELVE, 33), ask(TWELVE, 200)])
    requests[1].resets = (Reset("now", 1.0),)
    outcome = played(engine(), requests)
    assert [hits(outcome, index) for index in (1, 2)] == [(0, 0, 0), (12, 0, 0)]


def test_a_page_of_token_pairs_needs_the_token_after_it() -> None:
    requests = [replace(request, bigram=True) for request in make_requests([ask(TWELVE), ask(TWELVE, 1)])]
    assert hits(played(engine(), requests), 1) == (7, 0, 0)


def test_a_hit_does_not_end_inside_an_image() -> None:
    requests = make_requests([ask(TWELVE), ask(TWELVE, 1)])
    for request in requests:
        request.images = ((24, 44),)
    assert hits(played(engine(), requests), 1) == (6, 0, 0)


def test_a_persistent_prompt_stays_whole_when_it_is_computed() -> None:
    requests = make_requests([ask(TWELVE), ask("m" + TWELVE, 100), ask(TWELVE, 200)])
    requests[0].persistent = True
    served = small_engine(gpu=27, max_batch_tokens=EIGHT_PAGES)
    outcome = served.run(requests)
    served.cache.check()
    assert hits(outcome, 2) == (12, 0, 0)
    assert served.gpu.pool.capacity - served.gpu.available_pages == 12


def test_a_prefill_engine_finds_them_and_a_decode_engine_has_them_when_all_have_landed() -> None:
    cluster = small_cluster(gpu=40, prefill=1, settings={"max_batch_tokens": EIGHT_PAGES})
    outcome = cluster.serve(ask(TWELVE, output=3), ask(TWELVE + "x", 1, output=3))
    assert hits(outcome, 1) == (8, 0, 0)
    assert [engine.gpu.inserted_pages for engine in cluster.engines] == [13, 13]


def test_engines_that_share_a_cpu_tier_find_only_what_their_own_gpu_has() -> None:
    settings = {"max_batch_tokens": EIGHT_PAGES}
    cluster = small_cluster(gpu=40, cpu=40, routing=Sent(0, 1, 0), settings=settings)
    outcome = cluster.serve(ask(TWELVE), ask(TWELVE, 1), ask(TWELVE, 1.5))
    assert [hits(outcome, index) for index in (1, 2)] == [(0, 0, 0), (8, 0, 0)]
