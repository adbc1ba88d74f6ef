"""Whole runs whose policy refuses requests: records, files, comparisons, processes, engines' own rules."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import kvsim
from kvsim.cli import main
from kvsim.core.request import Request
from kvsim.engine.outcome import FINISHED, SHED
from kvsim.errors import UsageError
from kvsim.policies.admission.base import AdmissionPolicy, ClusterLoad
from kvsim.policies.admission.queue_limit import QueueLimit
from kvsim.report.comparison.compare import Comparison
from kvsim.report.summary import facts, shed_requests
from kvsim.results.runs import read_runs
from kvsim.run.profile import Profile
from kvsim.trace.base import Trace
from tests.plans.test_admission import plan
from tests.run.test_scaled_runs import RULES

GPU = ("tiers.gpu.capacity=4000pages",)
LIMITED = (*GPU, "admission=queue_limit", "admission.waiting_requests=2")
OBJECTIVE = "slo.ttft_s=1"
ALONE = {name: [word for word in words if ".scope=" not in word] for name, words in RULES.items() if name != "hybrid"}
"""For one engine."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=60, rate=8)


@pytest.mark.parametrize("name", [*RULES, "apart"])
def test_requests_end_or_are_refused_whatever_the_rules(name: str, trace: Trace) -> None:
    cluster = ("cluster.engines=2",) if name != "apart" else ("cluster.prefill=1", "cluster.decode=1")
    result = kvsim.simulate(trace, *LIMITED, *cluster, *RULES.get(name, ()))
    status = result.outcome.status
    assert set(status.tolist()) == {FINISHED, SHED}
    assert (np.isnan(result.outcome.e2e_s) == (status == SHED)).all()


@pytest.mark.parametrize("name", ["predicted_ttft", "queue_limit"])
def test_a_policy_that_refuses_nothing_changes_no_number(name: str, trace: Trace) -> None:
    never = {"predicted_ttft": "admission.ttft_s=1e6", "queue_limit": "admission.waiting_requests=100000"}[name]
    without = kvsim.simulate(trace, *GPU, "cluster.engines=2", "routing=kv_aware")
    with_it = kvsim.simulate(trace, *GPU, "cluster.engines=2", "routing=kv_aware", f"admission={name}", never)
    for column, values in without.outcome.columns.items():
        assert values.tobytes() == with_it.outcome.columns[column].tobytes(), column
    assert without.admission is None and with_it.admission["shed"] == 0


def test_predictions_hold_on_an_engine_without_other_load() -> None:
    """Requests that come alone have the time that is predicted for them, to a microsecond."""
    trace = kvsim.load_trace("synthetic", sessions=12, rate=0.001)
    result = kvsim.simulate(trace, "tiers.gpu.capacity=40GiB")
    profile = Profile(plan("tiers.gpu.capacity=40GiB"))
    first = [request for request in trace.requests if request.after < 0][:5]
    for request in first:
        hit = int(result.outcome.hit_pages[request.index].sum()) * 16
        predicted = profile.prefill_s([(hit, request.prompt_tokens)], 0, 0)
        assert result.outcome.ttft_s[request.index] == pytest.approx(predicted, rel=1e-6)


def written(folder: Path, requests: Sequence[tuple[float, int, int]]) -> Trace:
    """Requests whose prompts share nothing, as (seconds, prompt tokens, tokens of the answer)."""
    path, lines = folder / "trace.jsonl", []
    for index, (at_s, prompt, answer) in enumerate(requests):
        blocks = list(range(1000 * index, 1000 * index + -(-prompt // 512)))
        lines.append({"timestamp": 1000 * at_s, "input_length": prompt, "output_length": answer, "hash_ids": blocks})
    path.write_text("\n".join(map(json.dumps, lines)))
    return kvsim.load_trace(path)


@pytest.mark.parametrize("name", ALONE)
def test_how_far_an_answer_is_follows_its_tokens(name: str, tmp_path: Path) -> None:
    """An answer of 600 tokens, in steps that take nearly the same time; the requests that ask are refused.

    With the overlap loop, the last token may be in flight.
    """
    heard: list[tuple[float, int, int]] = []

    class Heard(AdmissionPolicy):
        def admits(self, request: Request, load: ClusterLoad) -> bool:
            (engine,) = load.engines
            heard.extend((load.now, generated, engine.free_tokens) for _, generated in engine.answers)
            return not request.index

    trace = written(tmp_path, [(0.0, 1000, 600), *((0.5 * at, 10, 1) for at in range(1, 12))])
    result = kvsim.simulate(trace, *ALONE[name], "tiers.gpu.capacity=4000pages", admission=Heard())
    first_s, last_s = result.outcome.ttft_s[0], result.outcome.e2e_s[0]
    assert len(heard) > 3
    for now, generated, free in heard:
        expected = 1 + 599 * (now - first_s) / (last_s - first_s)
        assert expected - 3 < generated <= expected + 1
        assert 16 * 4000 - 1600 <= free <= 16 * 4000 - 1000


def test_the_wait_for_room_of_prefill_engines_is_not_predicted(trace: Trace) -> None:
    line = (*GPU, "cluster.prefill=1", "cluster.decode=1", "admission=predicted_ttft", "admission.ttft_s=1")
    with pytest.raises(UsageError, match="admission: PredictedTtft waits_for_room needs engines that compute prompts and decode"):
        kvsim.simulate(trace, *line, "admission.waits_for_room=true")


def test_fewer_are_late_if_the_wait_for_a_place_is_predicted(tmp_path: Path) -> None:
    """On a GPU with room for all, of whose requests four run at a time."""
    random = Random(5)
    trace = written(tmp_path, [(at / 10, random.randint(300, 1500), random.randint(50, 600)) for at in range(300)])
    line = ("tiers.gpu.capacity=unlimited", "engine.max_running_requests=4", "admission=predicted_ttft", "admission.ttft_s=1")
    late = []
    for waits in ("false", "true"):
        outcome = kvsim.simulate(trace, *line, f"admission.waits_for_room={waits}").outcome
        late.append(int(np.count_nonzero(outcome.ttft_s > 1)))
    assert late[1] < 0.5 * late[0] and late[0] > 100


@pytest.mark.parametrize("name", ALONE)
def test_fewer_are_late_if_the_wait_for_room_is_predicted(name: str, tmp_path: Path) -> None:
    """More come than there is memory for: a third of those that were late is refused, half under kvsim's and vLLM's rules."""
    random = Random(5)
    trace = written(tmp_path, [(at / 25, random.randint(300, 1500), random.randint(50, 600)) for at in range(500)])
    line = (*ALONE[name], "tiers.gpu.capacity=30000tokens", "admission=predicted_ttft", "admission.ttft_s=1")
    late = []
    for waits in ("false", "true"):
        outcome = kvsim.simulate(trace, *line, f"admission.waits_for_room={waits}").outcome
        late.append(int(np.count_nonzero(outcome.ttft_s > 1)))
    assert late[1] < 0.75 * late[0] and late[0] > 200


def test_a_prompt_is_computed_in_steps_beside_those_that_decode() -> None:
    """Of 8,192 tokens a step, one of each decoding request: the first prompt decodes once it is computed."""
    profile = Profile(plan())
    steps = profile._steps
    one = profile.prefill_s([(0, 8192)], 0, 0)
    assert profile.prefill_s([(0, 8192), (0, 100)], 0, 0) > one + profile.decode_step_s(1, 8192) * 0.99
    assert profile.prefill_s([(16, 116), (0, 50)], 3, 900) < one
    assert profile.prefill_s([], 3, 900) == 0.0 and steps is profile._steps


def test_a_profile_knows_of_drafts_and_adapters() -> None:
    """Three requests with drafts of 3 tokens take 12 of a step's 8,192; an adapter's step takes 2 ms more."""
    plain, drafted = Profile(plan()), Profile(plan("engine.speculation.tokens=3", "engine.speculation.acceptance=[1.0]"))
    assert plain.prefill_s([(0, 8180)], 3, 900) < 1.5 * drafted.prefill_s([(0, 8180)], 3, 900)
    assert drafted.prefill_s([(0, 8181)], 3, 900) > drafted.prefill_s([(0, 8180)], 3, 900) + 0.9 * drafted.decode_step_s(3, 900)
    assert (plain.tokens_per_step, drafted.tokens_per_step) == (1, 4)
    adapters = ("engine.lora.max_loras=2", "engine.lora.adapter_bytes=1", "engine.lora.step_overhead_s=0.002")
    assert Profile(plan(*adapters)).decode_step_s(3, 900) == pytest.approx(plain.decode_step_s(3, 900) + 0.002)


def test_the_load_on_decode_counts_what_a_step_yields_with_drafts() -> None:
    """A draft of 3 tokens that are always right yields 4: with an objective of half a step, nothing is refused."""
    trace = kvsim.load_trace("synthetic", sessions=8, rate=0.01)
    half_s = Profile(plan()).decode_step_s(1, 1000) / 2
    line = (*GPU, "admission=predicted_ttft", "admission.ttft_s=1000", "admission.decode_load=true", f"admission.tpot_s={half_s}")
    drafts = ("engine.speculation.tokens=3", "engine.speculation.acceptance=[1.0]")
    assert kvsim.simulate(trace, *line, *drafts).admission["shed"] == 0
    assert kvsim.simulate(trace, *line).admission["shed"] == len(trace.requests)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("admitted")
    assert main(["simulate", "trace.sessions=60", "trace.rate=8", *LIMITED, OBJECTIVE, "timeline=true", f"output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def record(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def test_the_record_and_the_rows_agree(folder: Path, record: Any) -> None:
    lines = gzip.decompress((folder / "requests.csv.gz").read_bytes()).decode().splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    refused = [row for row in rows if row["status"] == "shed"]
    admission = record["admission"]
    assert admission["shed"] == len(refused) > 0 and record["rejected"] == 0
    assert admission["share"] == pytest.approx(len(refused) / record["requests"])
    assert sum(one["shed"] for one in admission["classes"] if one["by"] == "type") == len(refused)
    assert sum(one["requests"] for one in admission["classes"] if one["by"] == "type") == record["requests"] == len(rows)
    assert all(row["hit_pages_gpu"] == "-1" and row["arrival_s"] and not row["ttft_s"] and not row["engine"] for row in refused)
    assert record["prompt_tokens"] == sum(int(row["prompt_tokens"]) for row in rows if row["status"] == "finished")


def test_objectives_count_refused_requests_as_missed(record: Any) -> None:
    met = record["slo"]["attainment"] * record["requests"]
    assert met <= record["requests"] - record["admission"]["shed"]
    assert sum(one["attainment"] * one["requests"] for one in record["slo"]["classes"]) == pytest.approx(met)


def test_what_was_refused_is_shown(record: Any, folder: Path) -> None:
    shown = dict(facts(record))
    assert shown["requests"].endswith(f"{record['admission']['shed']} shed")
    assert shown["admission"].startswith(f"{record['admission']['shed']} requests shed, ")
    served = record["requests"] - record["admission"]["shed"]
    assert shown["hit rate"].endswith(f"of {served} requests")
    events = gzip.decompress(next(folder.glob("*.json.gz")).read_bytes()).decode()
    assert "shed" in events and "refused requests" in events


def test_a_run_that_refuses_requests_competes_by_goodput_only(trace: Trace, tmp_path: Path) -> None:
    """It has the better times, of the requests that it serves."""
    settings = {"admission": ["none", QueueLimit(waiting_requests=1)]}
    kvsim.sweep(trace, settings, *GPU, OBJECTIVE, command="simulate", output=tmp_path / "swept")
    comparison = Comparison(read_runs([tmp_path / "swept"]), is_resampled=False)
    none, limited = (case.results[0] for case in comparison.cases)
    assert shed_requests(none) == 0 < shed_requests(limited) and limited["ttft_s"]["p99"] < none["ttft_s"]["p99"]
    assert comparison.competing() == [0] and comparison.competing(sheds=True) == [0, 1]
    shed = next(measure for measure in comparison.measures if measure.key == "shed")
    assert [shed.of(none), shed.of(limited)] == [None, shed_requests(limited)]


@pytest.mark.parametrize(
    "routing", [("session_affinity",), ("kv_aware", "routing.staleness_s=0.05", "routing.late_answers=true")]
)
def test_processes_refuse_what_one_process_refuses(routing: tuple[str, ...], trace: Trace) -> None:
    apart = kvsim.load_trace("synthetic", sessions=60, rate=8, arrivals="open_loop")
    overrides = (
        *GPU, "cluster.engines=4", "cluster.engines_per_host=1", f"routing={routing[0]}", *routing[1:], "admission=queue_limit",
        "admission.waiting_requests=1", "admission.prefill_tokens=9000",
    )  # fmt: skip
    one, two = (kvsim.simulate(apart, *overrides, f"cluster.workers={workers}").outcome for workers in (1, 2))
    assert (one.status == SHED).any() and one.has_admission and two.has_admission
    for column, values in one.columns.items():
        assert values.tobytes() == two.columns[column].tobytes(), column


def test_arrivals_that_are_refused_are_demand_for_an_autoscaler(trace: Trace) -> None:
    scaled = ("cluster.engines=3", "autoscaling=target_utilization", "autoscaling.target=2", "autoscaling.interval_s=1")
    result = kvsim.simulate(trace, *LIMITED, *scaled, "cluster.start_s=1")
    assert result.admission["shed"] and result.scaling["starts"]


class Every(AdmissionPolicy):
    """Refuses every n-th request, and tries to change what it is shown."""

    def __init__(self, n: int, write: str = "") -> None:
        self.n = n
        self.write = write

    def admits(self, request: Any, load: ClusterLoad) -> bool:
        if self.write:
            setattr(load.engines[0] if self.write == "running_requests" else load, self.write, 0)
        return bool((request.index + 1) % self.n)


def test_a_policy_of_ones_own_is_an_argument(trace: Trace) -> None:
    result = kvsim.simulate(trace, *GPU, admission=Every(5))
    refused = {request.index for request in trace.requests if not (request.index + 1) % 5}
    assert refused <= set(np.flatnonzero(result.outcome.status == SHED).tolist())
    assert result.admission["shed"] - result.admission["unsent"] <= len(refused)


@pytest.mark.parametrize("name", ["now", "engines", "running_requests"])
def test_what_a_policy_is_shown_is_read_only(name: str, trace: Trace) -> None:
    with pytest.raises(UsageError, match="admission policy Every failed at"):
        kvsim.simulate(trace, *GPU, admission=Every(5, name))
