"""Plays the study's workloads against servers with pools of several sizes, on the machine with the GPU.

    python experiments/real_servers/serve.py --conversations conversations.jsonl --output runs --pools 1x,0.7x --calibrate \
        --command 'vllm serve MODEL --load-format dummy'
    python experiments/real_servers/serve.py --conversations conversations.jsonl --output runs/sglang --engine sglang --pools 1x \
        --command 'python -m sglang.launch_server --model-path MODEL --load-format dummy --port 8000 --enable-metrics'

For each pool it starts the server with that much memory, waits until it is ready, plays every workload three times with the
cache emptied before each, and writes what the client saw: ``runs/POOL/WORKLOAD/N.jsonl.gz``. ``--calibrate`` also measures the
first server's steps, and fits ``HARDWARE_ENGINE.yaml`` to them, as ``run.py`` reads it. A server that does not start ends the
study with the last lines of its log.
"""

import os
import shlex
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from workloads import Workload, workloads

from kvsim.plans.build import build_run
from kvsim.results.observed_file import write_observed
from kvsim.run.execute import load_trace
from kvsim.servers.play import play_server
from kvsim.servers.settings import ServerSettings
from kvsim.settings.configuration import compose_with_choices

URL = "http://127.0.0.1:8000"
RUNS = 3
READY_S = 400


class Pool(NamedTuple):
    """The memory of a server."""

    tokens: int
    """On the GPU."""
    host_gib: int = 0
    """Memory on the host, for pages that the GPU evicts."""
    workloads: Sequence[str] = ("conversations", "sessions")


POOLS = {
    "all": Pool(400_000, workloads=()),
    "1x": Pool(192_000),
    "0.7x": Pool(134_400),
    "1.4x": Pool(268_800),
    "0.25x": Pool(48_000, workloads=("conversations",)),
    "offload": Pool(96_000, host_gib=16),
}
"""1x: the smallest pool, to a thousand blocks of 16, with which a simulation hits within one point of an unlimited pool."""


class Engine(NamedTuple):
    """How a server is told its memory."""

    pool_flag: str
    pool_unit: str
    """What the flag's number counts: pages or tokens."""
    page_flag: str
    page_tokens: int
    """Those of its own that the study takes if it is told none."""
    host_flags: str
    """For memory on the host; ``{gib}`` and ``{gb}`` stand for its size."""
    environment: Mapping[str, str] = {}
    """What lets a client empty the cache."""

    def flags(self, pool: Pool, page_tokens: int) -> list[str]:
        number = pool.tokens // page_tokens if self.pool_unit == "pages" else pool.tokens
        host = self.host_flags.format(gib=pool.host_gib, gb=pool.host_gib * 2**30 / 1e9).split() if pool.host_gib else []
        return [self.pool_flag, str(number), self.page_flag, str(page_tokens), *host]


ENGINES = {
    "vllm": Engine(
        "--num-gpu-blocks-override",
        "pages",
        "--block-size",
        16,
        "--kv-offloading-size {gib} --kv-offloading-backend native",
        {"VLLM_SERVER_DEV_MODE": "1"},
    ),
    "sglang": Engine(
        "--max-total-tokens",
        "tokens",
        "--page-size",
        1,
        "--enable-hierarchical-cache --hicache-size {gb:.0f}",
    ),
}


@contextmanager
def server(engine: Engine, command: str, pool: Pool, page_tokens: int, log: Path) -> Iterator[None]:
    """Run a server until the block ends. Raises SystemExit if it does not become ready."""
    words = [*shlex.split(command), *engine.flags(pool, page_tokens)]
    with log.open("w") as file:
        environment = {**os.environ, **engine.environment}
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_ready(process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{URL}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server is not ready:\n{log.read_text()[-3000:]}")


def play(workload: Workload, setup: Sequence[str], folder: Path, runs: int) -> None:
    """Play a workload and write each run."""
    config, choices = compose_with_choices([*setup, *workload.settings])
    plan = build_run(config, command="simulate", overrides=[], choices=choices)
    trace, _ = load_trace(plan)
    settings = ServerSettings(url=URL, speed=workload.speed, warmup_requests=2)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, runs + 1):
        began = time.monotonic()
        run = play_server(trace.requests, plan.page_tokens, settings)
        write_observed(folder / f"{number}.jsonl.gz", run)
        hits = run.cached_tokens.sum() / run.prompt_tokens.sum()
        told = [f"{time.monotonic() - began:.0f} s", f"hit rate {hits:.4f}", run.failures(), *run.notes]
        print(f"{folder}/{number}: {', '.join(filter(None, told))}", flush=True)


def calibrate(engine: str, hardware: str, folder: Path, seconds: float) -> None:
    """Fit a machine to the server's steps: ``HARDWARE_ENGINE.yaml``."""
    words = [f"server={URL}", "model=llama3_8b", f"hardware={hardware}", f"name={hardware}_{engine}"]
    words += [f"output={folder}", f"seconds={seconds}"]
    subprocess.run([sys.executable, "-m", "kvsim", "calibrate", *words], check=False)


def main() -> None:
    options = parsed()
    options.output.mkdir(parents=True, exist_ok=True)
    engine = ENGINES[options.engine]
    page_tokens = options.page_tokens or engine.page_tokens
    setup = [f"preset={options.engine}", f"page_tokens={page_tokens}"]
    for number, name in enumerate(options.pools.split(",")):
        pool = POOLS[name]
        began = time.monotonic()
        with server(engine, options.command, pool, page_tokens, options.output / f"{name}.log"):
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            if options.calibrate and number == 0:
                calibrate(options.engine, options.hardware, options.output, options.seconds)
                print(f"{name}: calibrated after {time.monotonic() - began:.0f} s", flush=True)
            for workload in workloads(options.conversations):
                if workload.name in pool.workloads and workload.name in options.workloads.split(","):
                    play(workload, setup, options.output / name / workload.name, options.runs)


def parsed() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=Path, required=True, help="the file that workloads.py writes")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="whose flags the command takes")
    parser.add_argument("--page-tokens", type=int, help="tokens of a page; left out: 16 of vLLM, 1 of SGLang")
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--workloads", default="conversations,sessions")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each workload")
    parser.add_argument("--command", required=True, help="starts the server on port 8000, without the size of its memory")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--hardware", default="h100", help="kvsim's name of the GPU, with whose peaks the calibration begins")
    parser.add_argument("--seconds", type=float, default=80.0, help="time for the calibration")
    return parser.parse_args()


if __name__ == "__main__":
    main()
