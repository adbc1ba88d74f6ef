"""Clients that others have written, as their users run them, against ``kvsim serve``."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trace.models import make_model

REQUESTS, ANSWER = 24, 20


@pytest.mark.long  # it starts a client with a dozen processes
def test_aiperf_measures_a_served_engine(tmp_path: Path) -> None:
    """Every request succeeds, answers have the length that was asked for as AIPerf's own tokenizer counts them, and cached tokens
    and metrics of the server are read. KVSIM_AIPERF names the command if it is not on the path."""
    aiperf = shutil.which(os.environ.get("KVSIM_AIPERF", "aiperf"))
    if aiperf is None:
        pytest.skip(
            "aiperf is not installed: pip install kvsim[clients], best in an environment of its own, and set KVSIM_AIPERF"
        )
    model = make_model(tmp_path / "model")
    config = Path(model) / "tokenizer_config.json"
    plain = json.loads(config.read_text()) | {"bos_token": "<|begin|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(plain))
    words = ["preset=vllm", "tiers.gpu.capacity=2000pages", "serve.port=0", f"serve.tokenizer={model}", "serve.model=tiny"]
    server = subprocess.Popen([sys.executable, "-m", "kvsim", "serve", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split(": ")[0]
        asked = [
            "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", model,
            "--concurrency", "4", "--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "200",
            "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(ANSWER), "--extra-inputs", "ignore_eos:true",
            "--ui", "none", "--output-artifact-dir", str(tmp_path / "out"),
        ]  # fmt: skip
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run([aiperf, *asked], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    finally:
        server.send_signal(signal.SIGTERM)
        told, _ = server.communicate(timeout=30)
    assert server.returncode == 0 and told.endswith("stopped by SIGTERM: no request was under way\n")
    lines = (tmp_path / "out" / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == REQUESTS and not any(record.get("error") for record in records)
    for record in records:
        metrics = record["metrics"]
        assert metrics["output_sequence_length"]["value"] == metrics["usage_completion_tokens"]["value"] == ANSWER
        assert metrics["usage_prompt_tokens"]["value"] >= 200 and "time_to_first_token" in metrics
    seen = json.loads((tmp_path / "out" / "server_metrics_export.json").read_text())
    assert "vllm:prompt_tokens" in json.dumps(seen)
