"""``kvsim validate`` against an emulated server, and with results of clients: from the words to the files."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsim.cli import main
from kvsim.commands.completion import complete
from kvsim.emulation.apis.base import ApiSettings
from kvsim.results.observed import ServerFacts
from kvsim.results.observed_file import write_observed
from tests.report.servers.observed_runs import observed
from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import Faults, emulated

PROMPTS = ("abcd", "abef", "abcd", "pqrs", "abcdgh", "pq", "tuvwxy", "abef", "pqrs", "abcd")
WIDE = ("validate.ttft_p50=100", "validate.ttft_p99=100")
"""No times: the machine that runs the tests is slower than any GPU."""
ONE_BY_ONE = "server.concurrency=1"
"""The next request is sent when the one before it has ended. Otherwise, a busy machine that runs both client and server makes
requests so late that nobody knows their order."""
SERVERS = {
    "vllm": ["preset=vllm", "tiers.gpu.capacity=256tokens"],
    "sglang": ["preset=sglang", "page_tokens=8", "tiers.gpu.capacity=256tokens", "engine.max_running_requests=48"],
}
"""Caches that are too small for all prompts."""
HITS = [0, 32, 64, 0, 64, 32, 0, 64, 64, 64]
"""What requests find that come one at a time: 16 tokens for each letter that a prompt shares with the beginning of an earlier
one."""
FACTS = ServerFacts(engine="vllm", page_tokens=16, capacity_tokens=4096)
UNKNOWN = np.full(10, np.nan)
LENGTHS = np.array([16 * len(word) + 5 for word in PROMPTS])


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


@pytest.fixture(autouse=True)
def trace(folder: Path) -> None:
    """A file of prompts, 16 tokens for each letter and 5 more, every 0.15 s."""
    lines = [
        {
            "timestamp": 150 * number,
            "token_ids": [ord(letter) for letter in word for _ in range(16)] + [1] * 5,
            "output_length": 4,
        }
        for number, word in enumerate(PROMPTS)
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))


def saved(name: str, cached: list[int] | None = HITS, **changes: Any) -> str:
    """Save a run against vLLM, its requests one after the other, and return the name of its file."""
    run = observed(cached, requests=10, output=4, token_s=0.01, ttft_s=[0.1] * 10)
    write_observed(Path(name), replace(run, **{"facts": FACTS, "prompt_tokens": LENGTHS, **changes}))
    return name


def validate(*words: str) -> int:
    return main(["validate", "trace.path=trace.jsonl", "hardware=h100", "model=llama3_8b", *words])


def record(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "validate.json").read_text())
    return found


@pytest.mark.parametrize("dialect", sorted(SERVERS))
def test_hits_given_the_server_s_order_are_those_of_the_server(dialect: str, capsys: pytest.CaptureFixture[str]) -> None:
    with emulated([*SERVERS[dialect], "hardware=h100"], dialect=dialect) as server:
        assert validate(f"server={server.url}", ONE_BY_ONE, "output=out", *WIDE) == 0
        again = validate(f"server={server.url}", ONE_BY_ONE, "output=out", *WIDE)
    found = record("out")
    assert found["given_order"]["differing"] == [0, 0, 0] and found["given_order"]["compared"] == [10, 10, 10]
    assert found["given_order"]["hit_rate"]["means"][1] > 0.1
    assert found["choices"]["preset"] == dialect and found["config"]["tiers"]["gpu"]["capacity"] == "256tokens"
    assert found["config"]["page_tokens"] == server.plan.page_tokens
    assert found["config"]["engine"]["max_running_requests"] == server.plan.engine.max_running_requests
    assert set(found["media"]) == {"device"} and found["times"]["tpot_p50"]["means"][1] >= 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["runs", "simulated", "validate.html", "validate.json"]
    assert sorted(path.name for path in Path("out/runs").iterdir()) == ["1.jsonl.gz", "2.jsonl.gz", "3.jsonl.gz"]
    captured = capsys.readouterr()
    assert "server's order" in captured.out and "10 requests: 3 runs on" in captured.out
    assert "Simulated requests arrive when the one has ended whose place they took" in " ".join(captured.out.split())
    assert again == 2 and "is a run of another validation: choose another folder with output=DIR, or" in captured.err
    assert validate("results=out/runs", "output=read", *WIDE) == 0
    same = record("read")
    assert same["given_order"] == found["given_order"] and same["times"] == found["times"]
    assert not Path("read/runs").exists()
    assert " results=out/runs output=read" in same["command_line"] and f"server={server.url}" in found["command_line"]


def test_a_hit_that_kvsim_would_not_have_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated([*SERVERS["vllm"], "hardware=h100"]) as server:
        assert validate(f"server={server.url}", ONE_BY_ONE, "validate.runs=1", "output=out", *WIDE) == 0
    path = Path("out/runs/1.jsonl.gz")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    wrong = json.loads(lines[-1])
    lines[-1] = json.dumps(wrong | {"cached_tokens": wrong.get("cached_tokens", 0) + 16})
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert validate(f"results={path}", "output=read", *WIDE) == 1
    error = capsys.readouterr().err
    assert "outside its tolerances: identical, server's order is 0.9 (must be at least 0.99)" in error
    assert record("read")["given_order"]["first_differing"] == [9]


def test_a_server_that_tells_no_hits_is_validated_by_times(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ApiSettings(tells_cached=False)
    with emulated([*SERVERS["vllm"], "hardware=h100"], settings=settings) as server:
        assert validate(f"server={server.url}", ONE_BY_ONE, "validate.runs=1", "output=out", *WIDE) == 0
    found = record("out")
    assert found["given_order"] is None and found["requests_cached"] is None and found["times"]["ttft_p50"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "start vLLM with --enable-prompt-tokens-details." in shown and "did not keep" not in shown


def test_requests_that_fail_are_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated([*SERVERS["vllm"], "hardware=h100"], faults=Faults(status={3: 500})) as server:
        assert validate(f"server={server.url}", ONE_BY_ONE, "validate.runs=1", "output=out", *WIDE) == 0
    assert record("out")["compared"] == 9
    assert "Failed on the server: 1. Compared: 9." in " ".join(capsys.readouterr().out.split())


def test_a_run_in_which_everything_failed_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated([*SERVERS["vllm"], "hardware=h100"], faults=Faults(status=dict.fromkeys(range(10), 500))) as server:
        assert validate(f"server={server.url}", "validate.runs=1", "output=out") == 2
    assert "10 of 10 requests failed: 10 x " in capsys.readouterr().err
    assert not Path("out/validate.json").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["server.speed=2"], "server.url is missing: set server=URL, such as server=http://localhost:8000, or results=FILE"),
        (["server=localhost"], "server.url must be an address such as http://localhost:8000, not 'localhost'"),
        (["server=http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["server=http://127.0.0.1:9", "server.sped=2"], "server.sped: there is no such setting; did you mean server.speed?"),
        (["server=http://127.0.0.1:9", "server.speed=0"], "server.speed must be"),
        (["results=none.json"], "results: none.json cannot be read: No such file or directory"),
        (["results=."], "results: . has no runs (*.jsonl.gz)"),
        (["results=trace.jsonl"], "results: trace.jsonl is of no known format: kvsim reads a run that kvsim has saved, AIPerf's"),
        (["results=bench.json", "server=http://x"], "server.url has no effect on runs that have been recorded"),
        (["results=bench.json", "validate.runs=3"], "validate.runs has no effect with results: leave it out"),
        (["results=bench.json"], "tiers.gpu.capacity: the server does not say how much memory it has for KV: set it"),
        (["results=bench.json", "tiers.gpu.capacity=256tokens"], "results: bench.json has 2 requests, but the trace has 10: set"),
        (
            ["results=bench.json", "tiers.gpu.capacity=256tokens", "validate.link_bytes=1"],
            "validate.link_bytes has no effect on kvsim validate server: leave it out",
        ),
        (
            ["results=bench.json", "tiers.gpu.capacity=256tokens", "validate.simulations=5"],
            "validate.simulations has no effect on a machine without noise: repeat kvsim calibrate",
        ),
        (["results=bench.json", "tiers.gpu.capacity=256tokens", "slo.ttft_s=1"], "slo.ttft_s has no effect on kvsim validate s"),
        (["-m", "results=bench.json"], "-m: kvsim validate takes a single configuration: leave out -m"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = {
        "endpoint_type": "vllm", "completed": 2, "input_lens": [5, 5], "output_lens": [1, 1], "ttfts": [0.1, 0.1],
        "itls": [[], []], "errors": ["", ""],
    }  # fmt: skip
    Path("bench.json").write_text(json.dumps(bench))
    assert validate(*words, "output=out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsim: {problem}") and error.count("\n") == 1
    assert not Path("out").exists()


def test_runs_do_not_share_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated([*SERVERS["vllm"], "hardware=h100"], settings=ApiSettings(has_reset=False)) as server:
        assert validate(f"server={server.url}", "output=out") == 2
        assert "cannot be told to empty its cache (HTTP 404): start vLLM with VLLM_SERVER_DEV_MODE=1" in capsys.readouterr().err
        assert validate(f"server={server.url}", "server.reset=false", "validate.runs=2", "output=out") == 2
        assert "leaves what one run has cached to the next one: set validate.runs=1" in capsys.readouterr().err
        assert validate(f"server={server.url}", ONE_BY_ONE, "server.reset=false", "output=out", *WIDE) == 0
    assert len(record("out")["runs"]) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["model=llama3_8b"], "hardware: set hardware=NAME, the machine that the server runs on"),
        (["model=llama3_8b", "hardware.gpus=2"], "hardware: set hardware=NAME, the machine that the server runs on"),
        (["hardware=h100"], "model: set model=NAME, the model that the server serves"),
    ],
)
def test_the_machine_and_the_model_must_be_named(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = replace(FACTS, settings={"parallel_config.tensor_parallel_size": 1})
    results = f"results={saved('1.jsonl.gz', facts=facts)}"
    assert main(["validate", "trace.path=trace.jsonl", results, *words]) == 2
    assert capsys.readouterr().err == f"kvsim: {problem}\n"


def test_other_commands_refuse_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "server.url=http://localhost:8000"]) == 2
    assert "server.url has no effect on kvsim simulate" in capsys.readouterr().err


def test_help_and_completion_know_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "server.concurrency"]) == 0
    assert "Requests under way at any time" in capsys.readouterr().out
    assert main(["validate", "server=http://localhost:8000", "--cfg", "job", "--package", "server"]) == 0
    assert "url: http://localhost:8000" in capsys.readouterr().out
    assert "server.concurrency=" in [word for word, _ in complete("kvsim validate server.conc")]
    assert "results=trace.jsonl" in [word for word, _ in complete("kvsim validate results=tr")]


def test_a_file_of_sglang_s_client_says_what_is_simulated() -> None:
    flags = {"page_size": 16, "max_total_num_tokens": 4096, "version": "0.5.23", "disable_overlap_schedule": True}
    lengths = [16 * len(word) + 5 for word in PROMPTS]
    document = {
        "backend": "sglang", "dataset_name": "mooncake", "completed": 10, "server_info": flags, "input_lens": lengths,
        "output_lens": [4] * 10, "ttfts": [0.01] * 10, "itls": [[0.005] * 3] * 10, "errors": [""] * 10, "cached_tokens": HITS,
        "cached_tokens_details": [{"device": hit, "host": 0} for hit in HITS],
    }  # fmt: skip
    Path("bench.jsonl").write_text(json.dumps(document) + "\n" + json.dumps(document))
    assert validate("results=bench.jsonl", "output=out", *WIDE) == 0
    found = record("out")
    assert found["choices"]["preset"] == "sglang" and found["config"]["rules"]["loop"] == "plain"
    assert found["config"]["page_tokens"] == 16 and len(found["runs"]) == 2
    assert found["given_order"]["differing"] == [0, 0] and found["simulated_order"]["between_real"] == 0


def test_what_nobody_knows_the_order_of_is_not_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(f"results={saved('1.jsonl.gz', first_token_s=UNKNOWN)}", "output=out") == 0
    assert record("out")["given_order"] is None and [check["name"] for check in record("out")["checks"]] == ["hit_rate"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "Nothing is replayed in the server's order: a run has neither times in the queue nor first tokens." in shown
    first_s = np.where(np.arange(10) == 3, np.nan, np.arange(10) + 0.1)
    assert validate(f"results={saved('2.jsonl.gz', first_token_s=first_s)}", "output=again", *WIDE) in (0, 1)
    assert "Not replayed, without a time in the queue and a first token: 1." in " ".join(capsys.readouterr().out.split())
    assert record("again")["given_order"]["compared"] == [9]


@pytest.mark.parametrize(
    ("cached", "words", "problem"),
    [
        (HITS, ["warmup=0.9"], "no request succeeded in all runs and simulations after the warm-up of 9 requests"),
        (None, [], "the runs say neither what requests found nor when first tokens came: there is nothing to compare"),
    ],
)
def test_runs_of_which_nothing_can_be_compared_are_an_error(
    cached: list[int] | None, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [None] * 9 + ["refused"]
    name = saved("1.jsonl.gz", cached, first_token_s=UNKNOWN, errors=errors)
    assert validate(f"results={name}", "output=out", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsim: {problem}") and error.count("\n") == 1
    assert not Path("out/validate.json").exists()


def test_counters_do_not_leave_out_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    name = saved("1.jsonl.gz", counters={"vllm:prefix_cache_hits_total": 384.0})
    assert validate(f"results={name}", "warmup=0.5", "output=out", *WIDE) == 0
    assert record("out")["media"]["device"]["means"] == [384, 384]
    shown = " ".join(capsys.readouterr().out.split())
    assert "Cached tokens by medium are of whole runs, with the warm-up: they are the server's counters." in shown


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"facts": replace(FACTS, engine="sglang")}, "engine is vllm in the first run, but sglang in run 2"),
        ({"facts": replace(FACTS, capacity_tokens=2048)}, "tiers.gpu.capacity is 4096tokens in the first run, but 2048tokens in"),
        ({"facts": replace(FACTS, page_tokens=32)}, "page_tokens is 16 in the first run, but 32 in run 2"),
        ({"speed": 2.0}, "server.speed is 1.0 in the first run, but 2.0 in run 2: compare runs of one server and load"),
        ({"concurrency": 4}, "server.concurrency is None in the first run, but 4 in run 2"),
    ],
)
def test_runs_of_different_servers_or_loads_are_not_mixed(
    changes: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(f"results={saved('1.jsonl.gz')},{saved('2.jsonl.gz', **changes)}", "output=out") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsim: results: {problem}") and error.count("\n") == 1
    assert not Path("out").exists()


def test_a_file_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(f"results={saved('1.jsonl.gz')},../{Path.cwd().name}/1.jsonl.gz", "output=out") == 2
    assert capsys.readouterr().err == "kvsim: results: 1.jsonl.gz is named twice: name each file once\n"


def test_answers_that_are_not_as_long_as_in_the_trace_are_simulated_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.array([4, 2, 4, 90, 4, 4, 4, 4, 4, 4])
    assert validate(f"results={saved('1.jsonl.gz', output_tokens=lengths)}", "output=out", *WIDE) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 answers are not as long as in the trace, by up to 86 tokens: simulated as long as in the first run." in shown
    simulated, real = record("out")["times"]["output_tokens_per_s"]["means"]
    requests_s = record("out")["times"]["requests_per_s"]["means"]
    assert simulated / requests_s[0] == pytest.approx(12.4) == real / requests_s[1]
    assert validate(f"results={saved('2.jsonl.gz')}", "output=same", *WIDE) == 0
    assert "answers" not in capsys.readouterr().out


def test_cpu_memory_that_a_server_fills_with_copies_is_simulated_without_them() -> None:
    """16 GPUs have two copies of 8 KV heads, so half of the server's 512 MiB is for other pages."""
    settings = {
        "parallel_config.tensor_parallel_size": 16,
        "kv_transfer_config.kv_connector_extra_config.cpu_bytes_to_use": 1 << 29,
    }
    assert validate(f"results={saved('run.jsonl.gz', facts=replace(FACTS, settings=settings))}", "output=out", *WIDE) == 0
    found = record("out")
    assert found["config"]["tiers"]["cpu"]["capacity"] == "268435456B" and found["config"]["hardware"]["gpus"] == 16
    assert any(line.startswith("Cpu_bytes_to_use is 512 MiB for 2 copies of the KV") for line in found["notes"])
