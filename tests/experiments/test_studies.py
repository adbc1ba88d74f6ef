"""Every study runs on a trace of thirty requests and writes its table and its page; its claims are about whole traces."""

import csv
import gzip
import importlib.util
import json
import re
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvsim.report.study
from kvsim.settings.configuration import compose
from tests.policies.small_routing import prompt, router, sent_to
from tests.workloads import make_request, wildchat, write_trace

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Thirty requests in Mooncake's format: ten conversations of three turns."""
    prompts = [[0, *range(100 * chat + 1, 100 * chat + 2 + 2 * turn)] for turn in range(3) for chat in range(10)]
    requests = [
        make_request(blocks, prompt_tokens=512 * len(blocks), output_tokens=8, arrival_s=float(at))
        for at, blocks in enumerate(prompts)
    ]
    return write_trace(tmp_path / "trace.jsonl", requests)


def study(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str, script: str = "run") -> ModuleType:
    """The module of a study's ``run.py``, or of another of its scripts, with the command line that it will read."""
    path = EXPERIMENTS / name / f"{script}.py"
    spec = importlib.util.spec_from_file_location(f"study_{name}_{script}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setattr(kvsim.report.study, "take_screenshot", lambda *_, **__: False)
    spec.loader.exec_module(module)
    return module


def test_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("template", monkeypatch, "--limit", "30", "--output", str(tmp_path))
    assert module.STUDY.main() == 0
    table = (tmp_path / "results.md").read_text()
    assert verdicts(table) == 2 and "| 64,000 | **" in table
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + 3 * 2
    assert (tmp_path / "results.html").stat().st_size > 100_000


def test_every_study_is_in_the_list_of_studies() -> None:
    listed = (EXPERIMENTS / "README.md").read_text()
    folders = [path.parent.name for path in EXPERIMENTS.glob("*/run.py")]
    hardware = [f"hardware/{path.stem}.py" for path in (EXPERIMENTS / "hardware").glob("*.py")]
    assert [name for name in (*folders, *hardware) if f"({name}" not in listed] == []


@pytest.mark.long
def test_adaptive_prefetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("adaptive_prefetch", monkeypatch, "--limit", "30", "--output", str(tmp_path))
    assert module.interval([float(at) for at in range(16)]) == pytest.approx((7.5, 2.131 * 4.760952 / 4), rel=1e-6)
    monkeypatch.setattr(module, "CPU_GIB", (4, 32))
    monkeypatch.setattr(module, "SEEDS", range(10, 12))
    assert module.STUDY.main() == 0
    assert verdicts((tmp_path / "results.md").read_text()) == 3
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 1 + 2 * 2 * 2


@pytest.mark.long
def test_knobs_flip(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("knobs_flip", monkeypatch, "--trace", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "GPU_PAGES", (6_000, 30_000))
    monkeypatch.setattr(module, "CPU_PAGES", (0, 3_000, 12_000, 60_000))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| 6,000 + 12,000 | 0 |" in table and "belady" in table and "unlimited" in table
    rows = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 1 + 2 * (5 + 3 * 11)
    assert (tmp_path / "out" / "results.html").stat().st_size > 100_000


@pytest.mark.long
def test_lru_or_not(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("lru_or_not", monkeypatch, "--trace", str(trace), "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "POLICIES", {"conversation": ("lru", "mq"), "synthetic": ("lru", "mq", "ttl")})
    monkeypatch.setattr(module, "CAPACITIES", {"conversation": (6, 1_000), "synthetic": (5_000, 80_000)})
    assert module.STUDY.main() == 1, "thirty requests in Mooncake's format are not Mooncake's"
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 6 and "| pages | 5,000 | 80,000 |" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * (2 + 2) + 2 * (3 + 3)


@pytest.mark.long
def test_sampling(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty requests are too few: a tier of 1% of 40 pages is refused, and a sample of 1% of them has no request."""
    module = study("sampling", monkeypatch, "--conversation", str(trace), "--weka", str(trace), "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "PLACES", (("conversations", (40, 300), 0.01, 2), ("generated", (9_000,), 0.25, 2)))
    monkeypatch.setattr(module, "FAILING", [("conversations", 40, 0.25)])
    monkeypatch.setattr(module, "SESSIONS", 400)
    monkeypatch.setattr(module, "POLICIES", {"lru": ("eviction=lru",), "s3_fifo": ("eviction=s3_fifo",)})
    assert module.STUDY.main() == 1, "claims about samples of 1% cannot hold without any"
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 6 and table.count("not measured") >= 3 and "refused" in table and "SHARDS-adj" in table
    assert (tmp_path / "out" / "results.html").stat().st_size > 100_000


@pytest.mark.long
def test_mooncake_figure_9(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("mooncake_fig9", monkeypatch, "--trace", str(trace), "--output", str(tmp_path))
    assert module.main() == 1, "these are not the published rates"
    assert "1,000,000" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.html").exists()


def test_engine_agreement(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty requests, recorded from the replay itself; then one of them hits a page more. Other engines are left out, and so
    are further columns of a rejected request."""
    golden = tmp_path / "golden"
    golden.mkdir()
    module = study("engine_agreement", monkeypatch, "--trace", str(trace), "--golden", str(golden), "--output", str(tmp_path))
    played = kvsim.load_trace("mooncake", path=str(trace), page_tokens=512)
    rows = module.replayed(played, ["preset=sglang", "tiers.gpu.capacity=6pages"], 3)
    for name in ("conv.sglang_lru_6", "conv.another_6"):
        with gzip.open(golden / f"{name}.txt.gz", "wt") as file:
            file.writelines(f"{number} {pages} {hit}\n" for number, pages, hit in rows)
    swapped = module.replayed(played, ["preset=fastdeploy", "tiers.gpu.capacity=3pages", "tiers.cpu.capacity=0"], 4)
    assert (-1, 0) in [row[2:] for row in swapped]
    with gzip.open(golden / "conv.fastdeploy_3_0.txt.gz", "wt") as file:
        file.writelines(f"{number} {pages} {gpu} {min(gpu, cpu)}\n" for number, pages, gpu, cpu in swapped)
    assert module.main() == 0
    table = (tmp_path / "results.md").read_text()
    assert "| conv.fastdeploy_3_0 |" in table
    assert "| conv.sglang_lru_6 |" in table and "| 30 | 0 |" in table and "another" not in table
    with gzip.open(golden / "conv.sglang_lru_6.txt.gz", "wt") as file:
        file.writelines(f"{number} {pages} {hit + (number == 7)}\n" for number, pages, hit in rows)
    assert module.main() == 1 and "| 30 | 1 |" in (tmp_path / "results.md").read_text()


def test_what_own_rules_show_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 pages the engine hits 5 and own rules 6, of two requests of which one has other hits."""
    study("engine_agreement", monkeypatch)
    own_rules = sys.modules["own_rules"]
    overrides = ["preset=sglang_hicache", "rules.version=0.5.15", "rules.cache_output=true", "replay.copy_steps=2", "seed=1"]
    own = ["preset=sglang_hicache", "rules=default", "rules.cache_output=true", "seed=1"]
    assert own_rules.own_overrides(overrides) == own
    replayed = own_rules.Worth(own_rules.Shown([2, 3], 20), own_rules.Shown([2, 4], 20))
    simulated = own_rules.Worth(own_rules.Shown([2, 3], 20, 4.0), own_rules.Shown([1, 2], 20, 3.0))
    assert own_rules.cells(replayed) == ("25.00%", "+5.00", "50.0%", "", "")
    assert own_rules.cells(simulated) == ("25.00%", "-10.00", "100.0%", "4.000", "-25.0 %")
    runs = [(overrides, "replay", 0, replayed), (overrides, "replay", 3, None), (["preset=vllm"], "simulate", 0, simulated)]
    assert own_rules.summary(runs) == [
        ("SGLang", "replay", "1 of 2", "+5.00 to +5.00", "up to 50.0%", ""),
        ("vLLM", "simulate", "1 of 1", "-10.00 to -10.00", "up to 100.0%", "-25.0 to -25.0 %"),
    ]


def test_engine_agreement_of_schedules(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty requests, recorded from the simulation itself; then one of them comes later, and then a step is another."""
    golden = tmp_path / "golden"
    (golden / "schedule").mkdir(parents=True)
    module = study("engine_agreement", monkeypatch, "--trace", str(trace), "--golden", str(golden), "--output", str(tmp_path))
    schedules = sys.modules["schedules"]
    overrides = [*schedules.overrides(40_000), "trace.rate=1"]
    outcome = schedules.outcome_of(schedules.Recording("", trace, overrides, [], []), overrides)
    times = zip(outcome.arrival_s + outcome.ttft_s, outcome.arrival_s + outcome.e2e_s, outcome.hit_pages[:, 0] * 16, strict=True)
    rows = [f"{index} {first} {last} {hits} 0\n" for index, (first, last, hits) in enumerate(times)]
    steps = [f"0.0 {tokens} {decoding} {chunks} 0 0 0\n" for tokens, decoding, chunks in schedules.steps_done(outcome)]

    def record(rows: list[str], steps: list[str]) -> int:
        for name, lines in (("requests", rows), ("steps", steps)):
            with gzip.open(golden / "schedule" / f"mooncake_r1_c40000.{name}.gz", "wt") as file:
                file.writelines(["# columns\n", *lines])
        status: int = module.main()
        return status

    assert record(rows, steps) == 0
    assert "| schedule/mooncake_r1_c40000 |" in (tmp_path / "results.md").read_text()
    late = [*rows[:7], rows[7].replace(rows[7].split()[1], str(float(rows[7].split()[1]) + 1e-5)), *rows[8:]]
    assert record(late, steps) == 1 and "| 30 | 1 |" in (tmp_path / "results.md").read_text()
    assert record(rows, steps[:-1]) == 1


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Three agent sessions in WEKA's format, of three requests each."""
    path = tmp_path / "weka.jsonl"
    lines = [
        {"id": str(at), "requests": [{"t": t, "in": 64 * (20 + t), "out": 64, "hash_ids": list(range(20 + t))} for t in range(3)]}
        for at in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.long
def test_checkpoints(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    files = ("--conversation", str(trace), "--weka", str(sessions), "--requests", "30", "9")
    module = study("checkpoints", monkeypatch, *files, "--output", str(out))
    for name, value in {"GIB": (5,), "MODELS": ("qwen3_next_80b",), "INTERVALS": (512, 2048), "SPLITS": (0.1, 0.5)}.items():
        monkeypatch.setattr(module, name, value)
    assert module.STUDY.main() == 0
    rows = (out / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * (len(module.POLICIES) + 3) + 2 * 2 * 2 + 2 * 2
    table = (out / "results.md").read_text()
    assert table.count("| holds |") + table.count("| FAILS |") == 5
    for row in csv.DictReader(rows):
        if row["study"] == "policy" and row["choice"] != "unlimited":
            bounds = {
                other["choice"]: float(other["hit_rate"]) for other in csv.DictReader(rows) if other["trace"] == row["trace"]
            }
            assert float(row["hit_rate"]) <= bounds["KV alone, Belady"] <= bounds["unlimited"]
    assert "## weka, qwen3_next_80b" in table and (out / "results.html").exists()


def verdicts(table: str) -> int:
    """The number of claims with a verdict."""
    return table.count("| holds |") + table.count("| FAILS |")


@pytest.mark.long
def test_write_policy(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("write_policy", monkeypatch, "--trace", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "GPU_GIB", (2,))
    monkeypatch.setattr(module, "CPU_GIB", (1,))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 4 and "| 2 + 1 GiB |" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 3 * 2
    assert (tmp_path / "out" / "results.html").exists()


@pytest.mark.long
def test_shared_host(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("shared_host", monkeypatch, "--trace", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "ENGINES", (2, 4))
    monkeypatch.setattr(module, "POLICIES", ("write_through", "write_back"))
    monkeypatch.setattr(module, "GPU_GIB", 2)
    monkeypatch.setattr(module, "CPU_GIB", 1)
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 6 and "## prefix_aware" in table and "| write_back | " in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * 2 * 3 * 2
    assert (tmp_path / "out" / "results.html").exists()


def test_the_gains_of_a_shared_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gains 4 and 6 points in turns, 5 and 2 under the best other router: it leads by -1 and 4, and grows by 2."""
    module = study("shared_host", monkeypatch)
    monkeypatch.setattr(module, "ENGINES", (2, 4))
    monkeypatch.setattr(module, "POLICIES", ("write_back",))
    gained = {(2, "round_robin"): 4, (4, "round_robin"): 6, (2, "kv_aware"): 5, (4, "kv_aware"): 1}
    gained |= {(2, "prefix_aware"): 0, (4, "prefix_aware"): 2}
    rows = {
        module.Cell(module.Place(engines, router, "write_back"), scope): module.Row(
            0.2 + (points / 100 if scope == "host" else 0), 0.1, 1.0, 2.0, 0.0, 0.5
        )
        for (engines, router), points in gained.items()
        for scope in module.SCOPES
    }
    gain = module.gains(rows)
    assert list(module.leads(gain).values()) == pytest.approx([-1, 4])
    assert list(module.growth(gain).values()) == pytest.approx([2])


@pytest.mark.long
def test_prefill_decode(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("prefill_decode", monkeypatch, "--trace", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "RATES", (0.5, 1.0))
    monkeypatch.setattr(module, "LINKS", (12.5, 50.0))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 7 and "| 0.5 | undivided |" in table and "| 1 | 3 + 1 |" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * (1 + 3 * 2)
    assert (tmp_path / "out" / "results.html").exists()


def test_which_requests_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five requests the first is late, the second stutters, and the third was rejected; the last has one token only."""
    module = study("prefill_decode", monkeypatch)
    none = float("nan")
    outcome = SimpleNamespace(
        status=np.array([0, 0, 1, 0, 0]),
        ttft_s=np.array([2.1, 1.0, none, 2.0, 0.5]),
        tpot_s=np.array([0.01, 0.06, none, 0.05, none]),
    )
    assert module.good_share(outcome, 0.05) == 2 / 5
    assert module.good_share(outcome, 0.01) == 1 / 5


@pytest.mark.long
def test_prefetch_threshold(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("prefetch_threshold", monkeypatch, "--trace", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "THRESHOLDS", (128, 4096))
    monkeypatch.setattr(module, "GB_PER_S", (1, 5))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 4 and "wait_complete" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 1 + 2 * (1 + 2 + 3)


@pytest.mark.long
def test_memory_split(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("memory_split", monkeypatch, "--trace", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "SIZES", ((1, 2, 4),))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 4 and "| 1 + 2 + 4 GiB, write_back |" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * (1 + 3 * 3)


@pytest.mark.long
def test_agents(sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("agents", monkeypatch, "--trace", str(sessions), "--limit", "9", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "SESSIONS", (2,))
    monkeypatch.setattr(module, "GIB", (1, 2))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 4 and "| 2 sessions, 1 GiB |" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * 4


@pytest.mark.long
def test_checkpoint_interval(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--conversation", str(trace), "--weka", str(sessions), "--limit", "9")
    module = study("checkpoint_interval", monkeypatch, *files, "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "INTERVALS", (512, 1024, 4096))
    monkeypatch.setattr(module, "GIB", (5,))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 4 and "## conversation: hit rate" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * 3


@pytest.mark.long
def test_compute_savings(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--weka", str(sessions), "--conversation", str(trace), "--file", str(trace))
    module = study("compute_savings", monkeypatch, *files, "--limit", "9", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "GIB", (24, 1024))
    monkeypatch.setattr(module, "HBM_GIB", (24,))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 7 and "## file" in table and "The file has 9 requests" in table and "FreeInference" in table
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    needs_kinds = [row["trace"] for row in rows if row["policy"] == "workload_aware"]
    assert len(rows) == 4 * 2 * 9 + len(needs_kinds) + 3 * 4 and "conversation" not in needs_kinds
    assert all(0 <= float(row["saved"]) <= 1 for row in rows)


@pytest.mark.long
def test_tail_latency(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--conversation", str(trace), "--wildchat", str(wildchat(tmp_path)), "--limit", "60")
    module = study("tail_latency", monkeypatch, *files, "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "SAMPLES", 2)
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 7 and "drawn: ShareGPT, 2 samples" in table and "## WildChat: P90 shorter than LRU's" in table
    rows = (tmp_path / "out" / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * 6 * (2 + 3 * 5) + 4 * 2 * 4 + 5 * 5


@pytest.mark.long
def test_workload_aware(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is at hand, a file in the format of trace A, which is not the published one."""
    published = tmp_path / "trace_a.jsonl"
    lines = [
        {"chat_id": 3 * chat + turn, "parent_chat_id": 3 * chat + turn - 1 if turn else -1, "timestamp": 3 * chat + turn}
        | {"type": "text", "turn": turn + 1, "input_length": 128 * (turn + 1), "output_length": 9}
        | {"hash_ids": list(range(64 * chat, 64 * chat + 8 * (turn + 1)))}
        for chat in range(10)
        for turn in range(3)
    ]
    published.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--conversation", str(trace), "--weka", str(sessions), "--trace_a", str(published), "--limit", "300")
    module = study("workload_aware", monkeypatch, *files, "--output", str(tmp_path / "out"))
    monkeypatch.setattr(sys.modules["stand_ins"], "HOURS", 0.05)
    capacities = {name: sizes[:1] for name, sizes in module.CAPACITIES.items()} | {"trace_a": module.CAPACITIES["trace_a"]}
    monkeypatch.setattr(module, "CAPACITIES", capacities)
    monkeypatch.setattr(module, "TIMED", (1_024,))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 7 and "another file: its sha256 is" in table and "not at hand" in table
    assert "## Hit rate, trace_a" in table and "## Hit rate, trace_b" not in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 5 * 7 + 3 + 8 * 7 + 3 * 3


@pytest.mark.long
def test_hybrid_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = tmp_path / "lmsys.jsonl"
    lines = [
        {"session_id": chat, "turn_id": turn, "ts": 5.0 * turn + chat, "input_tokens": list(range(64 * (turn + 1)))}
        | {"num_input_tokens": 64 * (turn + 1), "num_output_tokens": 2, "output_tokens": [1, 2]}
        for turn in range(3)
        for chat in range(5)
    ]
    published.write_text("".join(json.dumps(line) + "\n" for line in lines))
    module = study("hybrid_states", monkeypatch, "--lmsys", str(published), "--limit", "15", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "GB", {name: sizes[:1] for name, sizes in module.GB.items()})
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 7 and "## lmsys, 2 sessions per second" in table and table.count("not at hand") == 2
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 4 * 2 * 5 + 5 * 3


@pytest.mark.long
def test_routing(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--conversation", str(trace), "--weka", str(sessions), "--requests", "30", "9")
    module = study("routing", monkeypatch, *files, "--output", str(tmp_path / "out"))
    clusters = sys.modules["clusters"]
    monkeypatch.setattr(clusters, "ENGINES", (2, 8))
    monkeypatch.setattr(clusters, "LOADS", {clusters.CHATS: (0.35, 0.5), clusters.AGENTS: (12,)})
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 6 and "## agents (WEKA): imbalance" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + (3 + 2) * 10
    assert (tmp_path / "out" / "results.html").exists()


@pytest.mark.long
def test_all_routers(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("routers", monkeypatch, "--conversation", str(trace), "--limit", "30", "--output", str(tmp_path / "out"))
    monkeypatch.setattr(module, "LOADS", (0.35, 0.5))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 5 and "## p99 TTFT (s)" in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 2 * len(module.ROUTERS)


def test_every_router_is_in_the_study_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    module = study("routers", monkeypatch)
    assert sorted(module.NAMES) == sorted(path.stem for path in (EXPERIMENTS.parent / "conf" / "routing").glob("*.yaml"))


def test_what_is_claimed_of_all_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers as the claims have them, then with one number changed."""
    module = study("routers", monkeypatch)
    alike = {cell: module.Row(0.5, mean_s=3.0, p50_s=1.0, p99_s=9.0, imbalance=1.0) for cell in module.cells()}
    for load in module.LOADS:
        for name, changed in (
            ("round_robin", {"hit_rate": 0.1, "mean_s": 4.0}), ("lmetric", {"mean_s": 1.0}), ("skylb", {"p99_s": 8.0}),
            ("dynamo", {"hit_rate": 0.6}), ("llm_d", {"mean_s": 5.0}),
        ):  # fmt: skip
            cell = module.Cell(load, name)
            alike[cell] = replace(alike[cell], **changed)

    def held(router: str, load: float, **changed: float) -> list[bool]:
        cell = module.Cell(load, router)
        return [claim.holds for claim in module.claims(alike | {cell: replace(alike[cell], **changed)})]

    assert held("random", 0.2) == [True] * 5
    assert held("preble", 0.5, hit_rate=0.05) == [False, True, True, True, True]
    assert held("random", 0.65, mean_s=0.5) == [True, False, True, True, True]
    assert held("dynamo", 0.35, mean_s=3.1) == [True, True, False, True, True]
    assert held("llm_d, active", 0.2, mean_s=4.5) == [True, True, True, False, True]
    assert held("prefix_aware", 0.2, p99_s=7.0) == [True, True, True, True, False]


@pytest.mark.long
def test_lmetric(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's trace of tools has been fetched, the others have not."""
    files = ("--conversation", str(trace), "--published", str(tmp_path), "--limit", "30")
    trace.with_name("toolagent_trace.jsonl").write_bytes(trace.read_bytes())
    module = study("lmetric", monkeypatch, *files, "--output", str(tmp_path / "out"))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 5 and "| ToolAgent, 0.5 |" in table
    assert "`kvsim trace fetch bailian_a`" in table and "`kvsim trace fetch mooncake_toolagent`" not in table
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1 + 3 * (3 * 6 + 1)


def test_what_is_claimed_of_lmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers as the paper has them, then with one number changed."""
    module = study("lmetric", monkeypatch)
    mean_s = {"lmetric": 1.0, "llm-d": 1.05, "linear": 2.0, "dynamo": 2.1, "preble": 2.2, "vllm": 10.0}
    alike = {
        module.Cell("chats", load, name): module.Row(4.0, 0.5, mean * (1 + load if name == "vllm" else 1), 9.0, 0.01, 0.02)
        for load in module.LOADS
        for name, mean in mean_s.items()
    }

    def held(name: str, load: float, **changed: float) -> list[bool]:
        cell = module.Cell("chats", load, name)
        return [claim.holds for claim in module.claims(alike | {cell: replace(alike[cell], **changed)})]

    assert held("vllm", 0.5) == [True] * 5
    assert held("vllm", 0.5, mean_s=0.9) == [False, False, False, True, True]
    assert held("llm-d", 0.5, mean_s=0.8) == [True, False, True, True, True]
    assert held("dynamo", 0.5, mean_s=16.0) == [True, True, False, True, True]
    assert held("preble", 0.5, tpot_s=0.009) == [True, True, True, False, True]
    assert held("lmetric", 1.0, mean_s=5.0) == [True, True, True, True, False]


def test_agreement_of_two_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of three pairs, two are untied in the first order; both agree, or one does and one does not."""
    tau = study("lmetric", monkeypatch).tau
    assert tau({"a": 1, "b": 2, "c": 3}, {"a": 0.1, "b": 0.2, "c": 0.3}) == 1
    assert tau({"a": 1, "b": 2, "c": 3}, {"a": 3, "b": 2, "c": 1}) == -1
    assert tau({"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}) == pytest.approx(2 / 6**0.5)
    assert tau({"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 3, "c": 2}) == 0
    assert tau({"a": 1, "b": 1}, {"a": 1, "b": 2}) == 0


def test_what_vllm_balances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests that decode are less than one before its first token, and four are as much."""
    study("lmetric", monkeypatch)
    small = router(sys.modules["schedulers"].VLLM(), engines=2)
    for index in range(3):
        sent_to(small, 0, prompt(index=index), is_computed=True)
    waiting = sent_to(small, 1, prompt(index=3))
    asked = prompt(index=9)
    assert small.send(asked, 0.0) == 0
    small.ended(asked, 0, 0.0)
    sent_to(small, 0, prompt(index=4), is_computed=True)
    small.first_token(waiting, 1, 1.0)
    assert small.send(asked, 1.0) == 1


@pytest.mark.parametrize(("weight", "engine"), [(0.7, 0), (0.2, 1)])
def test_a_linear_combination_weighs_hits_against_load(weight: float, engine: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 33 tokens, 28 are cached on an engine with two requests, none on an idle one: 0.11 + 0.3 to 0.7, or 0.83 to 0.2."""
    study("lmetric", monkeypatch)
    small = router(sys.modules["schedulers"].Linear(weight=weight), engines=2)
    small.cached(0, (0, 7))
    for index in range(2):
        sent_to(small, 0, prompt(index=index))
    assert small.send(prompt((0, 8), index=9), 0.0) == engine


def test_the_time_to_first_token_is_estimated_by_what_waits_and_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token takes a second. Of 33, 28 are cached behind 9 that wait: 14 s. Behind 25 more, 39 s are too long."""
    study("lmetric", monkeypatch)
    small = router(sys.modules["schedulers"].LowestTTFT(), engines=2)
    small.cached(0, (0, 7))
    sent_to(small, 0, prompt((500, 2), index=0))
    asked = prompt((0, 8), index=9)
    assert small.send(asked, 0.0) == 0
    small.ended(asked, 0, 0.0)
    behind = sent_to(small, 0, prompt((600, 6), index=1))
    assert small.send(asked, 0.0) == 1
    small.ended(asked, 1, 0.0)
    small.first_token(behind, 0, 1.0)
    assert small.send(asked, 1.0) == 0


@pytest.mark.long
def test_leaderboards(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--conversation", str(trace), "--agents", str(sessions), "--limit", "30")
    module = study("leaderboard", monkeypatch, *files, "--output", str(tmp_path / "out"))
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 5
    assert [f"## {board.family.capitalize()}: all policies" in table for board in module.BOARDS] == [True] * 6
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert {row["family"] for row in rows} == {board.family for board in module.BOARDS}
    names = {row["policy"] for row in rows if row["family"] == "eviction"}
    assert names >= {path.stem for path in (EXPERIMENTS.parent / "conf" / "eviction").glob("*.yaml")}


def test_the_commands_of_leaderboards_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read as a shell and kvsim read it; a relative file stands for a trace of one's own."""
    module = study("leaderboard", monkeypatch)
    for board in module.BOARDS:
        first, command, *words = shlex.split(module.command(board).replace("\\\n", " "))
        assert (first, command) == ("kvsim", "leaderboard")
        config = compose(words)
        assert config.leaderboard.family == board.family
        assert list(config.leaderboard.capacities) == list(board.capacities)
        assert [text.split()[0].removesuffix(".jsonl.gz") for text in config.leaderboard.traces] == list(board.traces)


def test_what_is_claimed_of_leaderboards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that gains 3 points with the smallest tiers, and one that looks ahead, then with one number changed."""
    module = study("leaderboard", monkeypatch)
    traces = [{"name": name, "capacities": ["1pages", "9pages"]} for name in module.TRACES]

    def cell(policy: str, trace: str, capacity: str, gain: float) -> dict[str, Any]:
        return {"policy": policy, "trace": trace, "capacity": capacity, "gain": gain, "value": 0.5}

    def held(best: str = "mq", share: float = 0.3, **changed: float) -> list[bool]:
        points = {"conversation1pages": 3.0, "synthetic1pages": 3.0} | changed
        cells = [
            cell(policy, name, size, points.get(name + size, 0.1) / 100 if policy == "mq" else 9.0 * (policy == "kv_flow"))
            for policy in ("lru", "mq", "kv_flow")
            for name in module.TRACES
            for size in ("1pages", "9pages")
        ]
        places = [{"policy": "kv_flow", "headroom": 0.9}, {"policy": "mq", "headroom": share}, {"policy": "lru", "headroom": 0.0}]
        record = {"traces": traces, "cells": cells, "standings": places, "look_ahead": ["kv_flow"], "baseline": "lru"}
        return [claim.holds for claim in module.claims({module.EVICTION: {**record, "best": best, "verdict": "as it is"}})]

    assert held() == [True] * 5
    assert held(best="arc") == [False, True, True, True, True]
    assert held(synthetic1pages=1.9) == [True, False, True, True, True]
    assert held(conversation9pages=0.6) == [True, True, False, True, True]
    assert held(agents1pages=0.6) == [True, True, True, False, True]
    assert held(share=0.5) == [True, True, True, True, False]


@pytest.mark.long
def test_early_rejection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty requests, two at each time of the trace's clock."""
    requests = [
        make_request(range(9 * at, 9 * at + 9), prompt_tokens=512 * 9, output_tokens=40, arrival_s=float(at // 2))
        for at in range(30)
    ]
    trace = write_trace(tmp_path / "trace.jsonl", requests)
    files = ("--conversation", str(trace), "--limit", "60", "--output", str(tmp_path / "out"))
    module = study("early_rejection", monkeypatch, *files)
    assert module.STUDY.main() == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert verdicts(table) == 4 and table.count("| Llama 3 8B, 20 GiB |") == 2 + len(module.FACTORS)
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert len(rows) == 2 + 4 * len(module.FACTORS) and {row["shed"] for row in rows if not row["factor"]} == {"0"}


def test_what_is_claimed_of_early_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions that err half as much, with which one request more is in time, then with one number changed."""
    module = study("early_rejection", monkeypatch)

    def held(errors: tuple[float, float] = (4.0, 2.0), p90: tuple[float, float] = (4.0, 3.4), **more: int) -> list[bool]:
        rows = {
            cell: module.Row(
                99, 50 + more.get(f"at{int(10 * (cell.factor or 0))}", 1) * cell.waits_for_room, 9, 1.0, errors, errors, p90
            )
            for cell in module.cells()
        }
        return [claim.holds for claim in module.claims(rows)]

    assert held() == [True] * 4
    assert held(errors=(4.0, 2.1)) == [False, True, True, True]
    assert held(p90=(4.0, 3.5)) == [True, False, True, True]
    assert held(at10=0) == [True, True, False, True]
    assert held(**{f"at{number}": 0 for number in range(5, 10)}) == [True] * 4, "the best factor counts"
    assert held(**{f"at{number}": 0 for number in range(5, 11)}) == [True, True, False, False]


def test_the_guide_says_how_many_more_are_in_time() -> None:
    """With the wait for room: by a factor of 1 in both places, and by the best factor of each way where memory lacks."""
    with (EXPERIMENTS / "early_rejection" / "results.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["factor"]]
    in_time = {(row["place"], row["waits_for_room"], float(row["factor"])): int(row["in_time"]) for row in rows}
    computing, memory = dict.fromkeys(place for place, _, _ in in_time)
    more = {place: in_time[place, "True", 1.0] - in_time[place, "False", 1.0] for place in (computing, memory)}
    best = {
        waits: max(own for (place, way, _), own in in_time.items() if (place, way) == (memory, waits))
        for waits in ("False", "True")
    }
    guide = " ".join((EXPERIMENTS.parent / "docs" / "guides" / "cluster.md").read_text().split())
    assert f"{more[computing]} more are in time" in guide
    gained = best["True"] - best["False"]
    assert f"{more[memory]} more of 3,000 requests are in time; with the best factor of each, {gained} more." in guide


def test_every_study_with_a_picture_is_in_the_list_of_studies() -> None:
    """But for the one to copy, and that of running servers, which has pages of its own."""
    listed = (EXPERIMENTS.parent / "docs" / "studies" / "index.md").read_text()
    drawn = {path.parent.name for path in EXPERIMENTS.glob("*/results.png")} - {"template", "real_servers"}
    assert [name for name in sorted(drawn) if f"({name}/" not in listed] == [] and len(drawn) > 20


def test_boards_name_all_policies_that_gain_as_much_as_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of a millisecond apart, and one millisecond."""
    module = study("leaderboard", monkeypatch)
    gains = {"prism": 1.23026, "shortest_prefill": 1.23025, "shortest_prompt": 1.229, "fcfs": 0.0, "dlpm": None}
    places = [{"policy": name, "gain": gain, "noise": 0.172} for name, gain in gains.items()]
    record = {"standings": places, "best": "prism", "baseline": "fcfs", "measure": "ttft_s"}
    assert module.taken(record) == ("`prism`, `shortest_prefill`", "`fcfs`", "+1,230 ± 172 ms of mean TTFT")
    assert module.taken({**record, "best": "fcfs"})[0] == "`fcfs`"


def test_a_conversation_is_known_by_its_second_page(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten conversations, of three turns each; arrivals twice as fast."""
    study("routing", monkeypatch)
    requests = sys.modules["clusters"].load_chats(str(trace), 30, 2.0).requests
    assert [request.session for request in requests] == [request.session for request in requests[:10]] * 3
    assert len({request.session for request in requests}) == 10
    assert requests[-1].arrival_s == 29 / 2


def test_what_is_claimed_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that are all alike, then with one number changed."""
    module = study("routing", monkeypatch)
    clusters = sys.modules["clusters"]
    alike = dict.fromkeys(
        module.cells(), clusters.Row(0.5, mean_s=1, p50_s=1, p99_s=4, imbalance=1, busy_imbalance=1, busy_share=1, simulated_s=9)
    )

    def held(router: str, engines: int, **changed: float) -> list[bool]:
        cell = clusters.Cell(clusters.Place(clusters.AGENTS, engines, 12), router)
        return [claim.holds for claim in module.claims(alike | {cell: replace(alike[cell], **changed)})]

    assert held("random", 2) == [True, True, False, False, True, True]
    assert held("session_affinity", 8, hit_rate=0.52) == [False, True, False, False, True, True]
    assert held("random", 4, hit_rate=0.48) == [True, False, False, False, True, True]
    assert held("session_affinity", 8, imbalance=1.6, p99_s=4.1) == [True, True, False, True, True, True]
    assert held("session_affinity", 8, imbalance=1.6, p99_s=3.9) == [True, True, False, False, True, True]
    assert held("least_loaded", 8, p99_s=3.6) == [True, True, False, False, False, True]
    assert held("kv_aware, 10 s", 8, p99_s=4.5) == [True, True, False, False, True, False]
    assert held("kv_aware, 10 s", 8, hit_rate=0.48) == [True, True, False, False, True, False]


@pytest.mark.long
def test_policy_speed(trace: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("--conversation", str(trace), "--weka", str(sessions), "--output", str(tmp_path))
    module = study("policy_speed", monkeypatch, *files, "--only", "belady", "--limit", "9")
    monkeypatch.setattr(module, "CONVERSATION_PAGES", (10, 20))
    monkeypatch.setattr(module, "WEKA_PAGES", (50,))
    assert module.main() == 0
    (page,) = tmp_path.glob("results_belady*.md")
    assert page.read_text().count("| holds |") == 3 and "--only belady --limit 9`" in page.read_text()


def hardware_study(name: str) -> ModuleType:
    """The module of a study on hardware, which may import others of its folder, as a script does."""
    if (folder := str(EXPERIMENTS / "hardware")) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"study_{name}", EXPERIMENTS / "hardware" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_reused_pages(tmp_path: Path) -> None:
    """A few requests in the interpreter: too few movements for the claim, but every hit page is verified."""
    assert hardware_study("reuse").main(["--tiny", "--output", str(tmp_path), "trace.limit=8"]) == 1
    table = (tmp_path / "reuse.md").read_text()
    assert "| >= 100 | **fails** |" in table and "| wrong words | 0 | 0 | holds |" in table
    assert "all that were hit | holds |" in table and "| disk faults | 0 | 0 | holds |" in table


@pytest.mark.long
def test_decode_steps_are_timed_and_judged(tmp_path: Path) -> None:
    """In the interpreter nothing takes as long as on an H200."""
    assert hardware_study("decode_attention").main(["--tiny", "--output", str(tmp_path)]) == 1
    table = (tmp_path / "decode_attention.md").read_text()
    assert "| 2 | 64 | 50% | " in table and re.search(r"from the expected time \| -(99|100)\.\d% with ", table)


def test_what_is_claimed_of_decode_steps() -> None:
    module = hardware_study("decode_attention")
    for share, seconds, holds in (
        (0.0, 1.04, True),
        (0.0, 1.06, False),
        (0.0, 0.94, False),
        (0.5, 1.1, True),
        (0.9, 1.12, False),
    ):
        times = {0.0: 1.0, 0.5: 1.0, 0.9: 1.0} | {share: seconds}
        cases = [
            module.Case(requests=2, context=1024, share=part, seconds=seconds, expected_s=1.0) for part, seconds in times.items()
        ]
        assert all(claim.holds for claim in module.claims(cases)) is holds


@pytest.mark.long
def test_launches_are_timed_and_judged(tmp_path: Path) -> None:
    """In the interpreter no launch takes as long as on an H200."""
    assert hardware_study("prefill_launch").main(["--tiny", "--output", str(tmp_path)]) == 1
    assert "| 2 | 32 | 2 | " in (tmp_path / "prefill_launch.md").read_text()


def test_what_is_claimed_of_launches() -> None:
    """Times of launches and steps near and beyond the limits."""
    module = hardware_study("prefill_launch")
    hardware = hardware_study("loaded_model").hardware_of("h200_measured")
    hardware = replace(hardware, prefill_launch_s=0.008, chunk_launch_s=0.001, decode_launch_s=0.003, prefill_overhead_s=0.002)
    row = module.Launch(chunks=1, start=4096, decodes=8, launch_s=0.010, step_s=0.010)
    for chunks, steps, launch_s, step_s, holds in (
        (1, 10, 0.0129, 0.0144, [True, True]),
        (1, 10, 0.0131, 0.0144, [True, False]),
        (1, 10, 0.0129, 0.0158, [False, True]),
        (1, 9, 0.0129, 0.0130, [False, True]),
        (2, 10, 0.0129, 0.0162, [True, False]),
        (2, 10, 0.0129, 0.0119, [False, False]),
    ):
        kind = module.Served(
            chunks=chunks, continues=True, decodes=True, steps=steps, before_s=0.0, launch_s=launch_s, step_s=step_s
        )  # fmt: skip
        assert [claim.holds for claim in module.claims([row], [kind], hardware)] == holds
    assert not any(claim.holds for claim in module.claims([row], [], hardware))


@pytest.mark.long
def test_warming_is_measured(tmp_path: Path) -> None:
    assert hardware_study("warming").main(["--tiny", "--output", str(tmp_path)]) in (0, 1)
    assert "| from 0 | " in (tmp_path / "warming.md").read_text()


def test_a_gpu_that_slows_down_late_is_found() -> None:
    """The claims are tried with courses of our own: 100 steps of a tenth of a second, of which some are shorter."""
    module = hardware_study("warming")
    for decoded_s, seconds, holds in ((0.09, 0.1, True), (0.09, 0.098, False), (0.095, 0.1, False)):
        late = [0.1] * 9 + [seconds] * 10 + [0.1] * 60
        courses = {"rest": [[0.09, *late]], "decoding": [[decoded_s, *late]]}
        assert all(claim.holds for claim in module.claims(courses)) is holds


@pytest.mark.long
def test_two_gpus_share_the_hosts_memory_in_miniature(tmp_path: Path) -> None:
    assert hardware_study("two_gpus").main(["--tiny", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "two_gpus.json").read_text())
    assert found["walk 4"]["wrong_words"] == 0 and found["walk 4"]["foreign"] >= 15 and not found["failures"]
    assert "| loss of a process | as it should |  | holds |" in (tmp_path / "two_gpus.md").read_text()


def test_what_is_claimed_of_reused_pages() -> None:
    """The first run fails no claim, each other one a single claim."""
    module = hardware_study("reuse")
    links = ("gpu-cpu", "cpu-disk", "disk-cpu", "cpu-gpu")
    good = {"page_moves": dict.fromkeys(links, 5), "verified_pages": 7, "wrong_words": 0, "disk_faults": {}}
    changes: list[dict[str, Any]] = [
        {}, {"page_moves": dict.fromkeys(links, 4)}, {"page_moves": {"gpu-cpu": 10, "cpu-disk": 10}}, {"verified_pages": 6},
        {"wrong_words": 1}, {"disk_faults": {"checksum": 1}},
    ]  # fmt: skip
    failed = [
        [claim for claim, _, _, holds in module.claims({"hardware": good | change, "hit_pages": {"gpu": 7}}, 18, 4) if not holds]
        for change in changes
    ]
    assert failed == [
        [], ["page movements"], ["movements on the link with the fewest"], ["pages verified"], ["wrong words"], ["disk faults"]
    ]  # fmt: skip


@pytest.mark.long
def test_speed_of_a_sweep(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting a job takes longer than replaying thirty requests, so the claim, which allows 90 ms per job, fails."""
    output = tmp_path / "out"
    output.mkdir()
    options = ("--only", "sweep", "--repeats", "1", "--output", str(output))
    module = study("speed", monkeypatch, "--trace", str(trace), "--weka", str(trace), *options)
    monkeypatch.setattr(module, "SWEEP_CAPACITIES", (10, 20))
    monkeypatch.setattr(module, "SWEEP_POLICIES", ("lru", "fifo"))
    monkeypatch.setenv("COLUMNS", "200")
    assert module.main() == 1
    assert "## Sweep" in (output / "results.md").read_text() and (output / "results.json").exists()
    shown = capsys.readouterr().out
    assert "Sweep" in shown and "Peers" not in shown
    if find_spec("joblib") is None:
        assert "not measured" in shown and "pip install kvsim[joblib]" in shown
    else:
        assert "a sweep of 4 replays by 2 workers" in shown and shown.count("FAILS") == 2


@pytest.mark.parametrize(("build", "least"), [("pure Python", 0.18), ("compiled", 0.5)])
def test_floors_of_a_build(build: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best run relative to the yardstick's best; the aim is not a claim."""
    module = study("speed", monkeypatch)
    monkeypatch.setattr(module, "build_name", lambda: build)
    for factor, holds in ((0.99, False), (1.0, True)):
        runs = [module.Run(result={"requests_per_s": rate * factor}, peak_bytes=0) for rate in (1_000 * least, 10)]
        row = module.ONE_TIER.judge("replay", module.Beside(runs=runs, yardsticks=[1_000, 800]))
        assert row.holds is holds and row.claim.startswith(f">= {least:g}x") and ("aim" in row.claim) == (build == "compiled")
