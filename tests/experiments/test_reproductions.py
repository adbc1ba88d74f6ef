"""Helpers of the studies that repeat published results, on examples small enough to check by hand."""

import hashlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from kvsim.report.reproduction import PublishedFile, fetchable, file_rows
from kvsim.trace.base import Trace
from tests.experiments.test_studies import study
from tests.workloads import make_request


def test_a_file_is_known_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a")
    right = PublishedFile("file", "a file", "1 B", hashlib.sha256(b"a").hexdigest())
    assert right.state(None) == "not at hand"
    assert right.state(str(path)) == "played; it is the published one"
    assert right._replace(sha256="0").state(str(path)).startswith("played; another file: its sha256 is ca978112")
    assert right._replace(sha256=None).state(str(path)) == "played"


def test_files_that_can_be_fetched_say_how() -> None:
    assert fetchable("bailian_a") == (
        "qwen_traceA_blksz_16.jsonl",
        "Qwen-Bailian, ATC 2025: consumers; `kvsim trace fetch bailian_a`",
        "56 MB",
        "07cedc9ed8aff301994ac68ed4aede8123b7603673575eeba9dd677de663db17",
    )
    ((option, name, *_, here),) = file_rows({"trace_a": fetchable("bailian_a")}, Namespace(trace_a=None))
    assert (option, name, here) == ("--trace_a", "`qwen_traceA_blksz_16.jsonl`", "not at hand")


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    study("workload_aware", monkeypatch)
    module = sys.modules["stand_ins"]
    monkeypatch.setattr(module, "HOURS", 0.05)
    return module


def test_turns_are_counted_in_each_session(workloads: ModuleType) -> None:
    requests = [make_request([at], session=session) for at, session in enumerate((4, 4, 7, 4))]
    trace = workloads.with_turns(Trace(name="", requests=requests, page_tokens=16, block_tokens=None))
    assert [(request.kind, request.turn) for request in trace.requests] == [("text", 0), ("text", 1), ("text", 0), ("text", 2)]


def test_stand_ins_have_the_types_of_trace_a_and_compute_prompts_only(workloads: ModuleType) -> None:
    trace = workloads.stand_in(workloads.SHARED, 128)
    assert {request.kind for request in trace.requests} == {"text", "search", "image", "file"}
    assert {request.output_tokens for request in trace.requests} == {1}
    assert max(request.turn for request in trace.requests) > 0 and trace.requests[-1].arrival_s < 180
    one = workloads.stand_in(workloads.ONE_CLASS, 128).requests
    assert {(request.kind, request.turn) for request in one} == {("api", 1)}
    assert len({request.session for request in one}) == len(one)


def test_what_is_claimed_of_workload_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in which every claim holds, then with one number changed."""
    module = study("workload_aware", monkeypatch)
    names = [name for name in module.CAPACITIES if name != "trace_b"]
    rows = {}
    for cell in module.cells():
        if cell.trace not in names:
            continue
        first = cell.pages == module.CAPACITIES[cell.trace][0]
        if cell.trace == "trace_a":
            printed = module.BY_BLOCKS[cell.pages]
            rate = printed.aware if cell.policy in (module.SESSION, module.PAGES) else printed.lru
        elif cell.policy in (module.SESSION, module.PAGES) and cell.trace != module.ONE_CLASS:
            rate = 0.4 if first else 0.33
        else:
            rate = 0.3
        rows[cell] = module.Row(rate, (1.0 if cell.policy == "lru" else 0.7) if cell.timed else float("nan"))

    def held(trace: str, pages: int, policy: str, *, timed: bool = False, **changed: float) -> list[bool]:
        cell = module.Cell(trace, pages, policy, timed)
        return [claim.holds for claim in module.claims(rows | {cell: rows[cell]._replace(**changed)})]

    assert held("weka", 10_000, "lru", hit_rate=0.3) == [True] * 7
    assert held("weka", 10_000, "lru", hit_rate=0.41) == [False, False, False, True, True, True, True]
    assert held("weka", 10_000, "gdsf", hit_rate=0.41) == [True, False, True, True, True, True, True]
    assert held("weka", 100_000, module.PAGES, hit_rate=0.5) == [True, True, False, True, True, True, True]
    assert held(module.SHARED, 4_096, module.PAGES, hit_rate=0.29) == [True, True, True, False, True, True, True]
    assert held(module.ONE_CLASS, 1_024, module.SESSION, hit_rate=0.302) == [True, True, True, True, False, True, True]
    assert held(module.SHARED, 1_024, module.SESSION, timed=True, mean_s=1.1) == [True, True, True, True, True, False, True]
    assert held("trace_a", 4_096, "lru", hit_rate=0.12) == [True, True, True, True, True, True, False]


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return study("hybrid_states", monkeypatch)


def test_hit_rates_are_of_short_prompts_and_of_long_ones(hybrid: ModuleType) -> None:
    hits, prompts = [32, 0, 3_500], [64, 36, 7_000]
    assert [hybrid.rate_of(hits, prompts, side) for side in (-1, 1, 0)] == [0.32, 0.5, 3_532 / 7_100]
    assert hybrid.rate_of([1], [5], 1) == 0, "no long prompts"


def test_flops_are_those_of_the_papers_formulas(hybrid: ModuleType) -> None:
    """One token: 4 (8 D^2 + 4 D) + 28 * 16 D^2 + 24 (12 D^2 + 16 D N), D = 4096, N = 128."""
    square = 4_096**2
    assert hybrid.saved_flops(1) == 4 * (8 * square + 4 * 4_096) + 448 * square + 24 * (12 * square + 16 * 4_096 * 128)
    assert hybrid.saved_flops(0) == 0


def test_models_are_changed_as_in_the_paper(hybrid: ModuleType) -> None:
    assert hybrid.model_of("") == ("model=marconi_7b",)
    assert hybrid.model_of("N=16") == ("model=marconi_7b", "model.state_key_dim=16", "model.conv_channels=8224")
    assert [hybrid.model_of(f"1:{ratio}")[1] for ratio in (2, 4, 8)] == [f"model.recurrent_layers={n}" for n in (19, 22, 25)]


def test_published_lines_are_read_with_their_tokens_and_seconds(hybrid: ModuleType, tmp_path: Path) -> None:
    """Two turns of a session: the second begins with the first prompt and its answer."""
    first, answer = list(range(60)), list(range(100, 140))
    lines = [(0.5, first, answer), (12.25, [*first, *answer, *range(28)], [7])]
    text = [
        json.dumps(
            {"session_id": 3, "turn_id": turn, "ts": at, "num_input_tokens": len(prompt), "num_output_tokens": len(output)}
            | {"input_tokens": prompt, "output_tokens": output}
        )
        for turn, (at, prompt, output) in enumerate(lines)
    ]
    path = tmp_path / "lmsys.jsonl"
    path.write_text("\n".join(text) + "\n")
    early, late = hybrid.load("lmsys", 1.0, str(path), 9).requests
    assert (early.prompt_tokens, early.output_tokens, late.prompt_tokens) == (60, 40, 128)
    assert late.arrival_s - early.arrival_s == pytest.approx(11.75)
    known = [page for start, length in (*early.runs, *early.output_runs) for page in range(start, start + length)]
    assert known == [page for start, length in late.runs for page in range(start, start + length)][:3]


def test_what_is_claimed_of_hybrid_states(hybrid: ModuleType) -> None:
    """A table in which every claim holds, then with one number changed."""
    rates = {hybrid.VLLM: 0.01, hybrid.SGLANG: 0.5, hybrid.MARCONI: 0.5, hybrid.SEG_LEN: 0.5, hybrid.SPARSE: 0.1}
    rows = {}
    for cell in hybrid.cells():
        if cell.trace not in hybrid.KINDS:
            continue
        rate = rates[cell.policy]
        if cell.policy == hybrid.VLLM and cell.varied:
            rate = {"N=16": 0.2, "N=128": 0.1, "1:2": 0.4, "1:4": 0.3, "1:8": 0.2}[cell.varied]
        if cell.policy == hybrid.MARCONI and cell.gb == 30:
            rate = 0.51
        rows[cell] = hybrid.Row(rate, rate, rate, 1.0)

    def held(gb: int, policy: str, *, varied: str = "", **changed: float) -> list[bool]:
        cell = hybrid.Cell(hybrid.STAND_INS["swebench"], 0.5, gb, policy, varied)
        return [claim.holds for claim in hybrid.claims(rows | {cell: rows[cell]._replace(**changed)})]

    assert held(60, hybrid.VLLM, hit_rate=0.01) == [True] * 7
    assert held(60, hybrid.VLLM, hit_rate=0.51) == [False, True, True, True, True, True, True]
    assert held(20, hybrid.MARCONI, hit_rate=0.49) == [True, False, True, True, True, True, True]
    assert held(60, hybrid.MARCONI, hit_rate=0.515) == [True, True, False, True, True, True, True]
    assert held(60, hybrid.MARCONI, short=0.46) == [True, True, True, False, True, True, True]
    assert held(60, hybrid.VLLM, varied="N=128", hit_rate=0.3) == [True, True, True, True, False, True, True]
    assert held(60, hybrid.SEG_LEN, hit_rate=0.47) == [True, True, True, True, True, False, True]
    assert held(60, hybrid.SPARSE, hit_rate=0.505) == [True, True, True, True, True, True, False]
