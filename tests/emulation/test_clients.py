"""Benchmarks of LLM servers that others have written, as their users run them, against ``kvsim serve``."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.trace.models import make_model
from tests.waiting import LONG_S

pytestmark = pytest.mark.long  # each starts a server and a client, which loads a tokenizer's library

CLIENTS = Path(__file__).resolve().parents[2] / "build" / "clients"
"""Where `make clients` installs them."""
REQUESTS, ANSWER, PROMPT = 24, 20, 1500
SPEED = 0.2
"""Slower than real time, so that a busy machine's own delays are short beside those of the emulated engine."""
DELAY_S = 1.0
"""The most that a first token may take from the engine to the client, on average, on a busy machine."""


def client(name: str) -> Path:
    """The path of a file in the environment of the clients, once all of them are installed."""
    if not (CLIENTS / "installed").is_file():
        pytest.skip("the clients are not installed: make clients")
    return next(CLIENTS.glob(name))


def tokenizer(folder: Path) -> str:
    """A folder with a tokenizer as transformers reads it."""
    model = make_model(folder)
    config = folder / "tokenizer_config.json"
    plain = json.loads(config.read_text()) | {"bos_token": "<|begin|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(plain))
    return model


@contextmanager
def served(preset: str, model: str, *words: str) -> Iterator[str]:
    """The address of a server in a process of its own, which ends with no request under way."""
    words = (f"preset={preset}", "serve.port=0", f"serve.tokenizer={model}", "serve.model=tiny", *words)
    server = subprocess.Popen([sys.executable, "-m", "kvsim", "serve", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split(": ")[0]
    finally:
        server.send_signal(signal.SIGTERM)
        told, _ = server.communicate(timeout=LONG_S)
    assert server.returncode == 0 and told.endswith("stopped by SIGTERM: no request was under way\n")


def run(command: Sequence[object], folder: Path, **variables: str) -> None:
    """Run a client, which finds no hub, no cache and no folder of ours on Python's path."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own |= {"HOME": str(folder), "HF_HUB_OFFLINE": "1", **variables}
    ran = subprocess.run([*map(str, command)], cwd=folder, env=own, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]


class Counted:
    """What a server's metrics say at the end."""

    def __init__(self, url: str) -> None:
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=LONG_S).text)
        self.samples = [sample for family in families for sample in family.samples]

    def sum(self, name: str) -> float:
        """The sum of a counter over its labels, whichever engine's it is."""
        return sum(sample.value for sample in self.samples if re.fullmatch(f"(vllm|sglang):{name}", sample.name))

    def check(self, *, prompt_tokens: int, ttft_s: Sequence[float]) -> None:
        """What a client has measured is what the server has counted, but for the way of the tokens to the client."""
        assert self.sum("(request_success|num_requests)_total") == len(ttft_s) == REQUESTS
        assert self.sum("prompt_tokens_total") == prompt_tokens
        assert self.sum("generation_tokens_total") == REQUESTS * ANSWER
        assert self.sum("time_to_first_token_seconds_count") == REQUESTS
        told_s = self.sum("time_to_first_token_seconds_sum")
        assert told_s < sum(ttft_s) < told_s + REQUESTS * DELAY_S


@pytest.mark.parametrize("preset", ["vllm", "sglang"])
def test_guidellm_measures_a_served_engine(preset: str, tmp_path: Path) -> None:
    """Conversations of two turns: all succeed, and tokens, cached tokens and times are those of the engine."""
    guidellm, model = client("bin/guidellm"), tokenizer(tmp_path / "model")
    with served(preset, model, "tiers.gpu.capacity=100000tokens", f"serve.speed={SPEED}") as url:
        asked = [
            "run", "--backend", f"kind=openai_http,target={url},model=tiny", "--profile", "kind=concurrent,streams=4",
            "--constraint", f"kind=max_requests,count={REQUESTS}", "--tokenizer", f"kind=huggingface_auto,model={model}",
            "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER},turns=2",
            "--output", "kind=json,path=out.json", "--disable-console",
        ]  # fmt: skip
        run([guidellm, *asked], tmp_path, GUIDELLM__MAX_WORKER_PROCESSES="1")
        counted = Counted(url)
    requests = json.loads((tmp_path / "out.json").read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"] and not requests["incomplete"]
    records: list[dict[str, Any]] = requests["successful"]
    assert [record["output_tokens"] for record in records] == [ANSWER] * REQUESTS
    prompts = sum(record["prompt_tokens"] for record in records)
    counted.check(prompt_tokens=prompts, ttft_s=[record["time_to_first_token_ms"] / 1000 for record in records])
    cached = [record["cached_tokens"] for record in records]
    assert sum(cached) == counted.sum("(prefix_cache_hits|cached_tokens)_total")
    turns = [record["info"]["turn_index"] for record in records]
    assert all(tokens >= PROMPT for tokens, turn in zip(cached, turns, strict=True) if turn), "a second turn has hit the first"
    for record in records if preset == "vllm" else ():  # the engine's own times of each request
        told = record["response_metrics"]
        assert record["time_to_first_token_ms"] > told["queue_time_ms"] + told["time_to_first_token_ms"] > 0


@pytest.mark.parametrize("preset", ["vllm", "sglang"])
def test_bench_serving_of_sglang_measures_a_served_engine(preset: str, tmp_path: Path) -> None:
    """Prompts with shared beginnings, by SGLang's own interface or as completions."""
    script, model = client("lib/python3*/site-packages/sglang/bench_serving.py"), tokenizer(tmp_path / "model")
    with served(preset, model, "tiers.gpu.capacity=100000tokens", f"serve.speed={SPEED}") as url:
        asked = [
            "--backend", preset, "--base-url", url, "--model", "tiny", "--tokenizer", model, "--max-concurrency", 4,
            "--warmup-requests", 0, "--flush-cache", "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", 4,
            "--gsp-prompts-per-group", REQUESTS // 4, "--gsp-system-prompt-len", PROMPT, "--gsp-question-len", 50,
            "--gsp-output-len", ANSWER, "--output-file", "out.jsonl", "--output-details",
        ]  # fmt: skip
        run([client("bin/python"), "-P", script, *asked], tmp_path)
        counted = Counted(url)
    result = json.loads((tmp_path / "out.jsonl").read_text())
    assert result["completed"] == REQUESTS and result["output_lens"] == [ANSWER] * REQUESTS and not any(result["errors"])
    assert result["total_output_tokens_retokenized"] == REQUESTS * ANSWER, "answers as text have as many tokens as were asked for"
    counted.check(prompt_tokens=result["total_input_tokens"], ttft_s=result["ttfts"])
    hits = counted.sum("(prefix_cache_hits|cached_tokens)_total")
    assert hits >= (REQUESTS - 4 * 4) * PROMPT, "all but the first four requests of a group can hit its beginning"
    if preset == "sglang":
        assert result["server_info"]["max_total_num_tokens"] == 100_000


def test_aiperf_measures_a_served_engine(tmp_path: Path) -> None:
    """Every request succeeds, answers have the length that was asked for as AIPerf's own tokenizer counts them, and cached tokens
    and metrics of the server are read. KVSIM_AIPERF names the command if it is not on the path."""
    aiperf = shutil.which(os.environ.get("KVSIM_AIPERF", "aiperf"))
    if aiperf is None:
        pytest.skip("aiperf is not installed: pip install aiperf, best in an environment of its own, and set KVSIM_AIPERF")
    model = tokenizer(tmp_path / "model")
    with served("vllm", model, "tiers.gpu.capacity=2000pages") as url:
        asked = [
            "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", model,
            "--concurrency", "4", "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "200",
            "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(ANSWER), "--extra-inputs", "ignore_eos:true",
            "--ui", "none", "--output-artifact-dir", str(tmp_path / "out"),
        ]  # fmt: skip
        run([aiperf, *asked], tmp_path)
    lines = (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == REQUESTS and not any(record.get("error") for record in records)
    for record in records:
        metrics = record["metrics"]
        assert metrics["output_sequence_length"]["value"] == metrics["usage_completion_tokens"]["value"] == ANSWER
        assert metrics["usage_prompt_tokens"]["value"] >= 200 and "time_to_first_token" in metrics
    seen = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert "vllm:prompt_tokens" in json.dumps(seen)
