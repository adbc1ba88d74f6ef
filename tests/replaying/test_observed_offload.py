"""Requests as a real vLLM with memory on the host admitted them: when they are looked up, offer chunks and are preempted."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.plans.plan import Plan
from kvsim.report.servers.pauses import Steps, brief_pauses
from kvsim.report.servers.seen import as_observed, moments_of
from kvsim.results.observed_file import read_observed
from kvsim.run.execute import load_trace
from kvsim.run.observed_order import replay_observed
from kvsim.servers.prompts import as_sent
from tests.composing import plan
from tests.experiments.test_studies import study
from tests.replaying.test_preempted import PAGE, RUNS, Played, request


def engine(gpu: int, cpu: int, version: str = "0.25.1") -> Plan:
    return plan(
        "preset=vllm_offload", f"page_tokens={PAGE}", f"tiers.gpu.capacity={gpu}pages", f"tiers.cpu.capacity={cpu}pages",
        f"rules.version={version}", "rules.loop=overlap", command="simulate",
    )  # fmt: skip


def hits(played: Played) -> list[list[int]]:
    return played.outcome.hit_pages[:, :2].tolist()


STEPS_S = np.arange(0.0, 60.0, 0.5)
"""Steps that were formed."""


def test_a_prompt_is_found_on_the_host_with_its_last_page() -> None:
    """Of a prompt of two pages, the GPU may only be asked for the first one; the host has both, and the GPU neither any more."""
    whole = request(2, [0, 1])
    whole.prompt_tokens = 2 * PAGE
    asked = (request(0, [0, 1]), 0.0, [1.0]), (request(1, [10, 11, 12, 13, 14]), 10.0, [11.0]), (whole, 20.0, [21.0])
    assert hits(Played(engine(6, 20), asked, formed_s=STEPS_S))[2] == [0, 2]


def test_the_first_request_that_waits_keeps_its_chunks_by_being_looked_up() -> None:
    """Six chunks on the host, used in this order: 1 0, 30, 12 11 10. At 21 s, 10 11 12 20 is admitted, and 20 pushes one out: 30
    if it is known that 0 1 waits from 20 s on, and is looked up in the same step; else 1. Later, 0 1 finds what is left of it."""
    asked = (
        (request(0, [0, 1]), 0.0, [1.0]),
        (request(1, [30]), 5.0, [6.0]),
        (request(2, [10, 11, 12]), 10.0, [11.0]),
        (request(3, [10, 11, 12, 20]), 21.0, [22.0]),
        (request(4, [0, 1]), 40.0, [41.0]),
    )
    found = []
    for joined_s in ([0.0, 5.0, 10.0, 21.0, 20.0], [np.nan] * 5):
        found.append(sum(hits(Played(engine(6, 6), asked, formed_s=STEPS_S, joined_s=np.array(joined_s)))[4]))
    assert found == [2, 1]


@pytest.mark.parametrize(("pages", "admitted_s"), [(1, np.nan), (9, 19.7)], ids=["failed", "too_large"])
def test_a_request_that_is_not_played_keeps_nobody_in_line_from_being_looked_up(pages: int, admitted_s: float) -> None:
    """As above, with a sixth request that joined the line before 0 1."""
    asked = (
        (request(0, [0, 1]), 0.0, [1.0]),
        (request(1, [30]), 5.0, [6.0]),
        (request(2, [10, 11, 12]), 10.0, [11.0]),
        (request(3, [10, 11, 12, 20]), 21.0, [22.0]),
        (request(4, [0, 1]), 40.0, [41.0]),
        (request(5, list(range(50, 50 + pages))), admitted_s, [42.0]),
    )
    joined_s = np.array([0.0, 5.0, 10.0, 18.0, 20.0, 19.5])
    assert sum(hits(Played(engine(6, 6), asked, formed_s=STEPS_S, joined_s=joined_s))[4]) == 2


def test_a_request_is_looked_up_before_its_load_when_one_behind_it_is_admitted() -> None:
    """Of 0 1, the GPU has the first page alone when 2 asks for it. 3, behind it, is admitted at 20 s, and its chunks push 0 1 out
    of the host; 2 itself is admitted at 30 s. If both are known to wait in line, 2 must have begun its load by 20 s."""
    asked = (
        (request(0, [0, 1]), 0.0, [1.0]),
        (request(1, [10, 11, 12, 13, 14, 15]), 5.0, [6.0]),
        (request(2, [0, 1]), 30.0, [31.0]),
        (request(3, [20, 21, 22, 23]), 20.0, [21.0]),
    )
    found = []
    for joined_s in ([0.0, 5.0, 18.0, 19.0], [np.nan] * 4):
        found.append(hits(Played(engine(8, 8), asked, formed_s=STEPS_S, joined_s=np.array(joined_s)))[2])
    assert found == [[1, 1], [0, 0]]


def test_a_request_that_loads_is_admitted_beside_one_for_several_samples() -> None:
    """The third request is looked up at 20 s, before its load, since the one behind it is admitted then."""
    several = request(1, [10, 11, 12, 13, 14, 15])
    several.samples, several.output_tokens = 2, 1
    asked = (
        (request(0, [0, 1]), 0.0, [1.0]),
        (several, 5.0, [6.0]),
        (request(2, [0, 1]), 30.0, [31.0]),
        (request(3, [20, 21, 22, 23]), 20.0, [21.0]),
    )
    joined_s = np.array([0.0, 5.0, 18.0, 19.0])
    assert hits(Played(engine(12, 40), asked, formed_s=STEPS_S, joined_s=joined_s))[2] == [2, 0]


@pytest.mark.parametrize("paused", [0, 1])
def test_a_preempted_request_is_looked_up_before_those_in_line(paused: int) -> None:
    """One of the first two was out from 5 s to 20 s, while the third one waited in line: that is looked up in no step."""
    page_ids, line = ([0, 1], [30, 31]), request(2, [40, 41])
    tokens_s = [1.0, 2.0, 3.0, 4.0, 5.0, 21.0]
    asked = [(request(number, page_ids[number], 6 if number == paused else 1), 0.0, [1.0]) for number in range(2)]
    asked[paused] = asked[paused][0], 0.0, tokens_s
    looked_up: list[tuple[float, int]] = []

    class Watched(Played):
        def _watched(self, event: tuple[float, int, int, int, int]) -> None:
            server = self.replay.server
            if "look_up_waiting" not in vars(server):
                look_up = server.look_up_waiting

                def noted(one: Request, tokens: int) -> bool:
                    looked_up.append((self.replay.now_s, one.index))
                    return look_up(one, tokens)

                server.look_up_waiting = noted  # type: ignore[method-assign]
            super()._watched(event)

    about = {"pauses_s": {paused: [(5.0, 20.0)]}, "preemptions": 1, "joined_s": np.array([np.nan, np.nan, 6.0])}
    Watched(engine(40, 40), [*asked, (line, 30.0, [31.0])], formed_s=STEPS_S, **about)
    assert {number for at_s, number in looked_up if 6.0 < at_s < 20.0} == {paused}


def test_all_requests_behind_one_that_was_preempted_are_preempted_with_it_if_they_missed_its_step() -> None:
    """1 was out from 5 s to 20 s. 0 missed one step at 5 s: it was preempted with it, and 0.33 would not have preempted it."""
    tokens_s = [float(at) for at in range(1, 30)]
    asked = (
        (request(0, [0, 1], 28), 0.0, [at for at in tokens_s if at != 6.0]),
        (request(1, [10, 11], 15), 0.5, [1.5, 2.0, 3.0, 4.0, 5.0, *[20.0 + at for at in range(1, 11)]]),
    )
    about = {"formed_s": np.array(tokens_s), "pauses_s": {1: [(5.0, 20.0)]}, "brief_s": {0: [(5.0, 6.0)]}, "preemptions": 2}
    held = {}
    for version in ("0.25.1", "0.33.0"):
        held[version] = Played(engine(40, 40, version), asked, **about).held[5.0]
    assert held["0.25.1"] == 0 < held["0.33.0"]


def test_missing_one_step_counts_only_beside_a_request_that_was_preempted() -> None:
    """Steps at 1 ... 8 s, none ahead. 0 and 1 miss that of 4 s, where 2, which comes back at 7 s, was preempted; 1 misses that of
    6 s, too, where nobody was."""
    step_s = np.arange(1.0, 9.0)
    steps = Steps(step_s, step_s, 0)
    tokens_s = [np.delete(step_s, 3), np.delete(step_s, [3, 5]), np.delete(step_s, [3, 4, 5])]
    assert brief_pauses(tokens_s, steps, {2: [(3.0, 6.0)]}) == {0: [(3.0, 4.0)], 1: [(3.0, 4.0)]}


def test_a_recorded_run_with_memory_on_the_host_finds_what_the_server_said(
    shared: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """150 requests of vLLM 0.25.1 on an H100 with 5,999 blocks and 16 GiB on the host, preempted 175 times. Takes two seconds."""
    workloads = study("real_servers", monkeypatch, script="workloads")
    rows = workloads.conversations(workloads.read_rows(shared / "traces/mooncake_conversation_trace.jsonl.gz"))
    trace = tmp_path / "conversations.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = plan(
        "preset=vllm_offload", "rules.loop=overlap", "rules.version=0.25.1", "model=llama3_8b", "tiers.gpu.capacity=95984tokens",
        "tiers.cpu.capacity=16GiB", "engine.max_batch_tokens=8192", "trace=mooncake", f"trace.path={trace}", command="simulate",
    )  # fmt: skip
    run = read_observed(RUNS / "offload/conversations/1.jsonl.gz")
    requests = as_sent(load_trace(one)[0].requests, one.page_tokens)
    replayed = as_observed(replay_observed(one, requests, moments_of(run)), "replayed")
    assert replayed.cached_tokens.tolist() == run.cached_tokens.tolist()
    assert sum(replayed.tier_tokens["host"]) > 100_000
