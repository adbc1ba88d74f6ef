"""Any configuration, from the lines of a trace and the overrides of a command line to a result: what always holds.

KVSIM_ENGINE_RUNS=5000 makes as many runs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, assume, event, given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvsim.cluster.cluster import Cluster
from kvsim.core.request import Request
from kvsim.core.serving import ServedCache, Server
from kvsim.engine.outcome import FINISHED, REJECTED, SHED, Outcome
from kvsim.errors import NoEffect, TraceError, UsageError
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.plans.plan import Plan
from kvsim.plans.substrate_choice import SUBSTRATES
from kvsim.replaying.server import CacheServer, PassingServer
from kvsim.run import play
from kvsim.run.assembly import build_cluster, build_graphs, build_served
from kvsim.run.execute import execute
from tests.engine.configurations import MISTAKES, PAGE_TOKENS, PLAIN, Case, Kind, cases, engine_cases
from tests.engine.drawn import RUNS, SETTINGS
from tests.replaying.test_replay_is_simulation import FASTER, RATES
from tests.workloads import pages_of

FEW = hypothesis_settings(SETTINGS, max_examples=max(1, RUNS // 4))
APART = Kind(apart_ms=1e6)
"""Each request ends, transfers included, before the next one arrives."""


def one_line(error: UsageError) -> str:
    """The line of an error; no other is raised but for a fault of kvsim's."""
    assert type(error) in (UsageError, TraceError, NoEffect), error
    line = str(error)
    assert len(line) > 20 and line == line.strip() and "\n" not in line, line
    return line


@contextmanager
def refusals() -> Iterator[None]:
    """End the example where the configuration or the trace is refused, in one line; nothing else may go wrong."""
    try:
        yield
    except UsageError as error:
        event(f"refused: {one_line(error).split(':')[0]}")
        reject()


def served(plan: Plan, requests: list[Request]) -> tuple[Outcome, Cluster]:
    """What ``play.simulate`` does, with the cluster at its end. Raises UsageError."""
    play.check_answers(plan, requests)
    graphs = build_graphs(plan, requests)
    caches = [build_served(plan, graph, requests) for graph in graphs]
    cluster = build_cluster(plan, requests, caches, SUBSTRATES["simulated"].open(plan, requests, caches))
    return cluster.run(requests), cluster


def check_rows(outcome: Outcome, plan: Plan) -> None:
    """Every request has finished or was rejected; hits and times of the others can be."""
    recomputes, kept = plan.rules.recompute_last_token, any(request.persistent for request in outcome.requests)
    capacity = plan.tiers[0].capacity_pages or float("inf")
    taken = plan.replay.pages_taken(outcome.requests, plan.page_tokens)
    assert len(outcome.status) == len(outcome.hit_pages) == len(outcome.requests)
    for request, pages in zip(outcome.requests, taken, strict=True):
        index = request.index
        hits = outcome.hit_pages[index]
        assert (hits >= 0).all()
        if outcome.status[index] == REJECTED:
            begin_anew = request.samples > 1 and plan.model.recurrent_layers > 0  # without a state, samples share no pages
            assert kept or begin_anew or pages > capacity or plan.rules.engine, f"request {index} fits"
            assert not hits.any() and np.isnan([outcome.ttft_s[index], outcome.tpot_s[index], outcome.e2e_s[index]]).all()
            continue
        if outcome.status[index] == SHED:
            assert plan.admission.is_asked and outcome.has_admission
            assert not hits.any() and np.isnan([outcome.ttft_s[index], outcome.tpot_s[index], outcome.e2e_s[index]]).all()
            continue
        assert all(outcome.status[before] != SHED for before in request.predecessors), "it was never to be sent"
        assert outcome.status[index] == FINISHED and pages <= capacity
        assert not outcome.engines or outcome.engine[index] >= 0
        assert hits.sum() <= (request.lookup_pages(plan.page_tokens) if recomputes else request.prompt_pages)


def check_times(outcome: Outcome) -> None:
    """Times of finished requests add up, and later turns follow the answers that they wait for."""
    for request in outcome.requests:
        index = request.index
        if outcome.status[index] != FINISHED:
            continue
        ttft_s, e2e_s = outcome.ttft_s[index], outcome.e2e_s[index]
        assert 0 <= ttft_s <= e2e_s + 1e-9
        assert (outcome.phases_s[index] >= 0).all() and abs(outcome.phases_s[index].sum() - ttft_s) < 1e-6
        assert np.isnan(outcome.tpot_s[index]) == (request.output_tokens < 2)
        if request.after >= 0 and outcome.status[request.after] == FINISHED:
            ended_s = outcome.arrival_s[request.after] + outcome.e2e_s[request.after]
            assert abs(outcome.arrival_s[index] - ended_s - request.delay_s) < 1e-6


def check_hits(outcome: Outcome, plan: Plan) -> None:
    """Each page of a prompt was computed once at least, though perhaps for a request that was rejected later."""
    if plan.rules.cache_output or any(request.persistent for request in outcome.requests):
        return
    finished = [request for request in outcome.requests if outcome.status[request.index] == FINISHED]
    different = {page for request in finished for page in pages_of(request.runs)}
    assert outcome.hit_pages.sum() <= sum(request.prompt_pages for request in finished) - len(different)


def check_counts(outcome: Outcome, plan: Plan) -> None:
    """What links carried are the pages that the cache moved; what was prefetched was used or wasted."""
    prefetch, moved = outcome.prefetch, outcome.placement
    assert prefetch["used_pages"] + prefetch["wasted_pages"] == prefetch["fetched_pages"] <= moved["fetched_pages"]
    for use in outcome.tiers.values():
        assert use.peak_pages >= 0 and (use.capacity_pages is None or use.peak_pages <= use.capacity_pages)
    for link in outcome.links.values():
        assert link.busy_s >= 0 and link.intervals[:, 2].sum() >= link.bytes - link.transfers
    if outcome.engines:
        assert sum(use.failures for use in outcome.engines) == sum(map(len, outcome.outages.values()))
    if outcome.outages or plan.model.is_hybrid:
        return
    page_bytes, links = plan.model.page_bytes(plan.page_tokens), outcome.links
    loaded = sum(link.bytes for name, link in links.items() if name in ("cpu-gpu", "disk-gpu"))
    ends = {name: [LEVELS.index(end) for end in name.split("-")] for name in links}
    written = sum(link.bytes for name, link in links.items() if ends[name] == sorted(set(ends[name])))
    if "disk-cpu" in links and plan.hardware.gpus == 1:  # a prefetch that is cut short brings parts of pages
        more = links["disk-cpu"].bytes - moved["fetched_pages"] * page_bytes
        assert 0 <= more < max(1, links["disk-cpu"].transfers * page_bytes)
    if links and plan.hardware.gpus == 1:
        assert (loaded, written) == (moved["loaded_pages"] * page_bytes, moved["written_pages"] * page_bytes)


def check_end(cache: ServedCache, *, keeps_pins: bool) -> None:
    """Nothing is held, reserved or under way any more; pools add up; only persistent prompts stay pinned, and vLLM's blocks."""
    cache.check()
    assert not cache.leases and not cache.in_flight and not cache.residency.doomed and not cache.transfers.fetch_pins
    if not keeps_pins:
        assert not any(sum(node.pins) for node in cache.tree.root.descendants())
    for tier in cache.tiers:
        assert tier.reserved_pages == tier.leaving_pages == 0


@FEW
@given(case=cases())
def test_every_simulation_ends_and_adds_up(case: Case) -> None:
    with refusals():
        plan, requests = case.plan("simulate"), case.requests()
        outcome, cluster = served(plan, requests)
    event(f"engines: {len(cluster.engines)}")
    event(f"retractions: {outcome.retractions > 0}")
    check_rows(outcome, plan)
    check_times(outcome)
    check_hits(outcome, plan)
    check_counts(outcome, plan)
    for cache in cluster.caches:
        check_end(cache, keeps_pins=bool(plan.rules.engine) or any(request.persistent for request in requests))
    if cluster.scaler is not None:
        event(f"starts: {cluster.scaler.scaling.starts > 0}, stops: {cluster.scaler.scaling.stops > 0}")
        cluster.scaler.check()


def cache_of(server: Server) -> Any:
    """The cache that a server plays: kvsim's own, or an engine's, which serves by itself."""
    while isinstance(server, PassingServer):
        server = server.server
    return server.cache if isinstance(server, CacheServer) else server


@FEW
@given(case=cases())
def test_every_replay_ends_and_adds_up(case: Case) -> None:
    servers: list[Server] = []
    with refusals():
        plan, requests = case.plan("replay"), case.requests()
        outcome = play.replay(plan, requests, inspect=lambda server, _: servers.append(server))
    check_rows(outcome, plan)
    check_hits(outcome, plan)
    check_counts(outcome, plan)
    cache_of(servers[0]).check()
    assert np.isnan(outcome.ttft_s).all()


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(case: Case, command: str) -> str | None:
    """The line with which a command refuses a configuration; None if it runs."""
    try:
        plan, requests = case.plan(command), case.requests()
        play.check_capacity(plan, requests)
        _ = play.replay(plan, requests) if command == "replay" else play.simulate(plan, requests)
    except UsageError as error:
        return one_line(error)
    return None


@FEW
@given(case=cases(is_single=True), mistakes=st.lists(st.sampled_from(MISTAKES), min_size=1, max_size=2, unique=True))
def test_both_commands_refuse_the_same_in_the_same_words(case: Case, mistakes: list[str]) -> None:
    """Unless the line says that it is about one of them, or about an engine's rules, which apply to a replay only."""
    wrong = replace(case.but(*mistakes), replay=[], simulate=["hardware=linear"])
    lines = {command: refusal(wrong, command) for command in ("replay", "simulate")}
    event(f"refused: {[line and line.split(':')[0] for line in lines.values()]}")
    if not any(line and ("replay" in line or "rules" in line or "simulate" in line) for line in lines.values()):
        assert lines["replay"] == lines["simulate"]


# --- hits that are known ----------------------------------------------------------------------------------------------


def longest_prefixes(requests: list[Request], plan: Plan) -> list[int]:
    """Pages that each request finds of prompts and answers before it, if nothing ever leaves; page by page."""
    known: set[int] = set()
    hits = []
    plan = play.with_known_answers(plan, requests)
    for request in requests:
        if request.resets:
            known.clear()
        pages = pages_of(request.runs)
        limit = request.lookup_pages(plan.page_tokens) if plan.rules.recompute_last_token else len(pages)
        found = 0
        while found < limit and pages[found] in known:
            found += 1
        hits.append(request.pages_outside_images(found, plan.page_tokens))
        known.update(pages)
        if plan.rules.cache_output:
            known.update(page for runs in (request.output_runs or (), *request.sample_output_runs) for page in pages_of(runs))
    return hits


@FEW
@given(
    case=cases(st.sampled_from([APART, replace(APART, has_answers=True)]), is_single=True),
    command=st.sampled_from(["replay", "simulate"]),
)
def test_if_everything_fits_the_hits_are_the_longest_common_prefixes(case: Case, command: str) -> None:
    """Of a model with recurrent layers, they are at most that."""
    with refusals():
        plan, requests = case.but("tiers.gpu.capacity=unlimited").plan(command), case.requests()
        outcome = play.replay(plan, requests) if command == "replay" else play.simulate(plan, requests)
    most = longest_prefixes(requests, plan)
    hits = outcome.hit_pages.sum(axis=1).tolist()
    if plan.model.is_hybrid:
        assert all(hit <= limit for hit, limit in zip(hits, most, strict=True))
        assert outcome.known_pages is not None
        assert all(hit <= known <= limit for hit, known, limit in zip(hits, outcome.known_pages.tolist(), most, strict=True))
    else:
        assert hits == most


@FEW
@given(case=cases(st.just(replace(APART, has_samples=False)), is_single=True))
def test_a_replay_hits_what_a_simulation_hits_whose_requests_never_overlap(case: Case) -> None:
    """On the machine of test_replay_is_simulation.py: a step takes a moment, and all else no time."""
    assume(not any(override.endswith("=random") for override in case.common))
    with refusals():
        requests, of_replay, of_simulation = case.requests(), case.plan("replay"), case.plan("simulate")
        rates = {name: FASTER * getattr(of_simulation.hardware, name) for name in RATES}
        rates |= {"host_latency_s": 0.0, "disk_latency_s": 0.0, "rank_jitter": 0.0}
        hardware = replace(of_simulation.hardware, **rates)
        replayed = play.replay(replace(of_replay, hardware=hardware), requests)
        simulated = play.simulate(replace(of_simulation, hardware=hardware), requests)
    assert replayed.status.tolist() == simulated.status.tolist()
    assert replayed.hit_pages.tolist() == simulated.hit_pages.tolist()


@FEW
@given(case=engine_cases())
def test_every_engine_hits_at_most_the_longest_common_prefixes(case: Case) -> None:
    with refusals():
        plan, requests = case.plan("replay"), case.requests()
        outcome = play.replay(plan, requests)
    event(type(plan.rules).__name__)
    check_rows(outcome, plan)
    most = longest_prefixes(requests, plan)
    hits = outcome.hit_pages.sum(axis=1).tolist()
    assert all(hit <= limit for hit, limit in zip(hits, most, strict=True))


@FEW
@given(case=cases(st.just(replace(PLAIN, has_tenants=True))), more=st.integers(1, 6))
def test_a_larger_lru_tier_hits_all_that_a_smaller_one_hits(case: Case, more: int) -> None:
    """LRU is a stack algorithm (Mattson et al., 1970), also where what a request evicts is more than a page."""
    case = replace(case, common=["model=tiny", f"page_tokens={PAGE_TOKENS}"], replay=["replay.hold_output=false"], tail="full")
    requests = case.requests()
    least = max(1, *(request.pages_for(request.prompt_tokens, PAGE_TOKENS) for request in requests))
    smaller, larger = (
        play.replay(case.but(f"tiers.gpu.capacity={pages}pages").plan("replay"), requests).hit_pages[:, 0]
        for pages in (least, least + more)
    )
    assert (smaller <= larger).all()


# --- the same again ---------------------------------------------------------------------------------------------------

MEASURED = ("wall_s", "load_s", "requests_per_s", "versions")
"""Fields of a record that differ from run to run."""


def digest(case: Case) -> str:
    """A simulation and a replay of a case, all that is in their records but for times that they really took."""
    told = []
    for command in ("simulate", "replay"):
        try:
            result = execute(command, case.plan(command), case.trace())
        except UsageError as error:
            told.append(one_line(error))
            continue
        kept = {
            name: value for name, value in result.record.items() if name not in ("wall_s", "load_s", "requests_per_s", "versions")
        }
        told.append(json.dumps(kept, sort_keys=True, default=str))
        told.append(result.outcome.hit_pages.tobytes().hex() + result.outcome.e2e_s.tobytes().hex())
    return "\n".join(told)


@FEW
@given(case=cases())
def test_the_same_configuration_twice_has_the_same_record(case: Case) -> None:
    assert digest(case) == digest(case)


def print_digests() -> None:
    """Print what some cases come to, the same ones in every process."""

    @hypothesis_settings(max_examples=30, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(case=cases())
    def each(case: Case) -> None:
        print(digest(case))

    each()


@pytest.mark.long
def test_no_record_depends_on_the_hashes_of_strings() -> None:
    """Each process takes some seconds to import and compose."""
    code = "from tests.engine.test_configurations_random import print_digests; print_digests()"
    printed = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert len(printed[0].stdout) > 10_000 and printed[0].stdout == printed[1].stdout
