"""Prompts computed on one engine and decoded on another, reckoned by hand.

A is 17 tokens: 17 s to compute, 4.25 s for each of 4 layers. Its KV takes 4.25 s from GPU to GPU: 64 bytes, a page, a second.
"""

from collections.abc import Sequence
from typing import Any

import pytest

import kvsim
from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED, REJECTED, Outcome
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.policies.routing.base import EngineStatus
from kvsim.policies.routing.kv_aware import KVAware
from kvsim.run.assembly import build_cluster, build_graphs, build_served
from kvsim.settings.configuration import compose
from kvsim.trace.base import Trace
from tests.cluster.small_cluster import Sent, SmallCluster, small_cluster
from tests.engine.small import PAGE_BYTES, ask, hits, make_requests, seconds

A, B, C = "abcd", "efgh", "ijkl"
NONE = {"settings": {"overlap": "none"}}


def pair(**about: Any) -> SmallCluster:
    """A prefill engine, number 0, and a decode engine, number 1."""
    return small_cluster(**({"gpu": 20, "prefill": 1} | about))


def sent(outcome: Outcome) -> int:
    """Tokens that have gone from GPU to GPU."""
    return outcome.links["gpu-gpu"].bytes * 4 // PAGE_BYTES if "gpu-gpu" in outcome.links else 0


# --- times ---


def test_without_overlap_a_prompt_leaves_when_it_is_computed() -> None:
    """17 s and 4.25 s; then a token a second."""
    outcome = pair(**NONE).serve(ask(A, output=3))
    assert outcome.ttft_s[0] == seconds(17 + 4.25)
    assert outcome.e2e_s[0] == seconds(17 + 4.25 + 2)
    assert outcome.tpot_s[0] == seconds(1)
    assert (outcome.engine[0], outcome.decoder[0]) == (0, 1)  # type: ignore[index]
    assert sent(outcome) == 17


def test_layer_by_layer_only_the_last_layer_is_left_when_the_prompt_is_computed() -> None:
    """Three layers have landed before 17; the fourth takes 4.25 / 4 s."""
    assert pair().serve(ask(A, output=3)).ttft_s[0] == seconds(17 + 1.0625)


@pytest.mark.parametrize(("about", "expected"), [({}, 4.25 + 68), (NONE, 17 + 68)])
def test_over_a_slow_interconnect_the_first_token_waits_for_the_transfer(about: dict[str, Any], expected: float) -> None:
    """At 4 bytes/s, the prompt takes 68 s; layer by layer, it leaves when the first layer is computed."""
    outcome = pair(hardware={"interconnect_bytes_per_s": 4.0}, **about).serve(ask(A, output=2))
    assert outcome.ttft_s[0] == seconds(expected)


def test_every_transfer_has_the_latency_of_the_interconnect() -> None:
    assert pair(hardware={"interconnect_latency_s": 2.0}, **NONE).serve(ask(A, output=2)).ttft_s[0] == seconds(17 + 4.25 + 2)


def test_chunks_leave_one_after_another() -> None:
    """Chunks of 8, 8 and 1 token end at 8, 16 and 17. The second leaves at 10, takes 2 s; of the third, a layer takes 1/16 s."""
    outcome = pair(settings={"max_batch_tokens": 8}).serve(ask(A, output=2))
    assert outcome.ttft_s[0] == seconds(17 + 0.0625)
    starts = outcome.links["gpu-gpu"].intervals[:, 0].tolist()
    assert starts == seconds([2, 10, 16.25])


# --- what is sent ---


@pytest.mark.parametrize(("about", "expected"), [({}, 1 + 0.0625), (NONE, 1 + 0.25)])
def test_pages_that_the_decode_engine_has_are_not_sent_again(about: dict[str, Any], expected: float) -> None:
    """Both engines have A's pages: one token is computed and sent."""
    outcome = pair(**about).serve(ask(A, output=3), ask(A, 40, output=3))
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s[1] == seconds(expected)
    assert sent(outcome) == 17 + 1


@pytest.mark.parametrize(("about", "expected"), [({}, 0.25 + 4.25), (NONE, 1 + 4.25)])
def test_hits_of_the_prefill_engine_leave_with_the_first_chunk(about: dict[str, Any], expected: float) -> None:
    """Decode engine 2 has nothing: all of the prompt is sent, though one token is computed, in layers of 0.25 s."""
    outcome = pair(hosts=(0, 0, 0), decode_routing=Sent(1, 2), **about).serve(ask(A, output=3), ask(A, 40, output=3))
    assert hits(outcome, 1) == (4, 0, 0)
    assert outcome.ttft_s[1] == seconds(expected)
    assert sent(outcome) == 17 + 17


def test_answers_of_one_token_never_leave_the_prefill_engine() -> None:
    outcome = pair().serve(ask(A))
    assert outcome.ttft_s[0] == outcome.e2e_s[0] == seconds(17)
    assert outcome.decoder is not None and outcome.decoder[0] == 0 and not sent(outcome)


def test_two_prefill_engines_share_what_a_decode_engine_can_receive() -> None:
    """Both send 4.25 s of KV from 17 on: each at half the rate."""
    cluster = pair(prefill=2, hosts=(0, 0, 0), routing=Sent(0, 1), decode_routing=Sent(2), **NONE)
    assert cluster.serve(ask(A, output=2), ask(B, output=2)).ttft_s.tolist() == seconds([17 + 8.5] * 2)


def test_a_prefill_engine_shares_what_it_can_send() -> None:
    """Both are computed in one step of 34 s, and sent to different engines at half the rate."""
    cluster = pair(hosts=(0, 0, 0), decode_routing=Sent(1, 2), **NONE)
    assert cluster.serve(ask(A, output=2), ask(B, output=2)).ttft_s.tolist() == seconds([34 + 8.5] * 2)


# --- pages ---


def test_the_prefill_engine_keeps_a_prompts_pages_until_they_have_landed() -> None:
    """It has room for one prompt: B's begins when A's has landed, at 21.25."""
    cluster = pair(gpu=5, hosts=(0, 0, 0), decode_routing=Sent(1, 2), **NONE)
    outcome = cluster.serve(ask(A, output=2), ask(B, output=2))
    assert outcome.ttft_s.tolist() == seconds([21.25, 21.25 + 21.25])


def test_a_prompt_waits_for_pages_on_its_decode_engine_before_it_is_computed() -> None:
    """The decode engine has room for one: B's prompt begins when A's answer has ended, at 22.25."""
    cluster = pair(gpu=20, decode_gpu=5, prefill=2, hosts=(0, 0, 0), routing=Sent(0, 1), decode_routing=Sent(2), **NONE)
    outcome = cluster.serve(ask(A, output=2), ask(B, output=2))
    assert outcome.ttft_s.tolist() == seconds([21.25, 22.25 + 21.25])


def test_a_request_too_large_for_its_decode_engine_is_rejected_at_once() -> None:
    """25 tokens need 7 pages; one token less, and they need 6."""
    outcome = pair(decode_gpu=6).serve(ask(A, output=8), ask(A, output=7))
    assert outcome.status.tolist() == [REJECTED, FINISHED]


def test_a_retracted_request_has_its_prompt_computed_again_and_its_hits_counted_once() -> None:
    """Two answers grow to 6 pages each on 8: the later request is retracted, and all of what it had is sent again."""
    asks = ask("ab", output=12), ask("cd", output=12)
    outcome, roomy = pair(gpu=30, decode_gpu=8).serve(*asks), pair(gpu=30).serve(*asks)
    assert outcome.retractions == 1
    assert outcome.columns["retractions"].tolist() == [0, 1]
    assert outcome.ttft_s.tolist() == roomy.ttft_s.tolist()
    assert outcome.e2e_s[0] < roomy.e2e_s[0] and outcome.e2e_s[1] > roomy.e2e_s[1], "the first one decodes alone meanwhile"
    assert hits(outcome, 1) == (0, 0, 0)


def test_a_request_retracted_before_its_last_token_ends_on_the_prefill_engine() -> None:
    """Its prompt and answer so far are computed again, and the token that follows is its last one."""
    asks = ask("ab", output=9), ask("cd", output=9)
    outcome = pair(gpu=30, decode_gpu=8).serve(*asks)
    assert outcome.retractions == 1
    assert outcome.decoder is not None and outcome.decoder.tolist() == [1, 0]


def test_an_answer_that_the_decode_engine_wrote_down_is_a_hit_for_a_prefill_engine_of_its_host() -> None:
    """16 tokens and 9: pages e and f are full at the end, and in the CPU tier long before 100."""
    requests = make_requests([ask(A, tokens=0, output=9), ask("abcdef", 100)])
    requests[0].output_runs, requests[1].output_runs = ((4, 2),), ()
    outcome = pair(cpu=20, cache_output=True).serve_requests(requests)
    assert hits(outcome, 1) == (4, 2, 0)


def test_a_drain_waits_for_what_is_computed_and_takes_back_the_pages_of_what_waits() -> None:
    """One runs; one has its pages on the decode engine and waits. The drain at 5 ends with the first answer, at 22.25."""
    cluster = pair(gpu=5, decode_gpu=10, settings={"overlap": "none", "reset_at_s": [5.0]})
    outcome = cluster.serve(ask(A, output=2), ask(A, output=2), ask(A, 60, output=2))
    assert outcome.ttft_s.tolist() == seconds([21.25, 22.25 + 21.25, 1.25])
    assert hits(outcome, 1) == (0, 0, 0)


def test_prompts_that_stay_for_good_can_leave_no_room_for_others() -> None:
    """A takes 4 pages of 8 on both engines until the end; B needs 5, and waits for nothing."""
    requests = make_requests([ask(A, output=2), ask(B, 40, output=2), ask("a", 80, output=2)])
    requests[0].persistent = True
    for about in ({"gpu": 8}, {"gpu": 20, "decode_gpu": 8}):
        cluster = pair(**about)
        outcome = cluster.run(requests)
        assert outcome.status.tolist() == [FINISHED, REJECTED, FINISHED]
        assert not cluster.hand_over.senders and not cluster.hand_over._sent  # type: ignore[union-attr]


# --- routers ---


class Reporting(Sent):
    """Reads the load that engines report."""

    seen: list[int]

    @property
    def needs_reports(self) -> bool:
        return True

    def choose(self, request: Request, engines: Sequence[EngineStatus], now: float) -> int:
        self.seen = [status.used_pages for status in engines]
        return super().choose(request, engines, now)


def test_each_router_gets_the_reports_of_its_own_engines() -> None:
    """At 40, A's 4 pages are cached on engine 0; the last step of engine 1 left 5 pages in use."""
    routing, decode_routing = Reporting(0), Reporting(1)
    pair(routing=routing, decode_routing=decode_routing).serve(ask(A, output=3), ask(B, 40, output=3))
    assert len(routing.seen) == len(decode_routing.seen) == 1
    assert routing.seen[0] >= 4 and decode_routing.seen[0] >= 4


def test_routing_policies_know_what_their_engines_do() -> None:
    overrides = (
        "trace=synthetic", "cluster.prefill=1", "cluster.decode=1", "routing=kv_aware", "routing@cluster.decode_routing=kv_aware",
        "tiers.gpu.capacity=100pages",
    )  # fmt: skip
    plan = build_run(compose(overrides), command="simulate", overrides=overrides)
    caches = [build_served(plan, graph, []) for graph in build_graphs(plan)]
    cluster = build_cluster(plan, [], caches, SUBSTRATES["simulated"].open(plan, [], caches))
    assert cluster.router is not None and cluster.hand_over is not None
    before, after = cluster.router.policy, cluster.hand_over.router.policy
    assert isinstance(before, KVAware) and isinstance(after, KVAware)
    assert (before._prefills, before._decodes) == (True, False)
    assert (after._prefills, after._decodes) == (False, True)


def test_several_samples_cannot_be_handed_over() -> None:
    requests = make_requests([ask(A, output=3)])
    requests[0].samples = 2
    trace = Trace(name="small", requests=requests, page_tokens=4, block_tokens=None)
    with pytest.raises(UsageError, match=r"^cluster.prefill: the trace asks for several samples"):
        kvsim.simulate(trace, "cluster.prefill=1", "cluster.decode=1")
