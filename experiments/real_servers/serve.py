"""Plays the study's workloads against vLLM servers with pools of several sizes, on the machine with the GPU.

    python experiments/real_servers/serve.py --conversations conversations.jsonl --output runs --pools 1x,0.7x --calibrate \
        --command 'vllm serve MODEL --load-format dummy'

For each pool it starts the server with that many KV blocks, waits until it is ready, plays every workload three times with the
cache emptied before each, and writes what the client saw: ``runs/POOL/WORKLOAD/N.jsonl.gz``. ``--calibrate`` also measures the
first server's steps. A server that does not start ends the study with the last lines of its log.
"""

import shlex
import subprocess
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
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

    blocks: int
    """Blocks of 16 tokens on the GPU."""
    flags: Sequence[str] = ()
    workloads: Sequence[str] = ("conversations", "sessions")


POOLS = {
    "all": Pool(25_000, workloads=()),
    "1x": Pool(12_000),
    "0.7x": Pool(8_400),
    "1.4x": Pool(16_800),
    "0.25x": Pool(3_000, workloads=("conversations",)),
    "offload": Pool(6_000, ("--kv-offloading-size", "16", "--kv-offloading-backend", "native")),
}
"""1x: the smallest pool, to a thousand blocks, with which a simulation hits within one point of an unlimited pool."""


@contextmanager
def server(command: str, pool: Pool, log: Path) -> Iterator[None]:
    """Run a server until the block ends. Raises SystemExit if it does not become ready."""
    words = [*shlex.split(command), "--num-gpu-blocks-override", str(pool.blocks), *pool.flags]
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
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


def play(workload: Workload, folder: Path, runs: int) -> None:
    """Play a workload and write each run."""
    config, choices = compose_with_choices(["preset=vllm", *workload.settings])
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


def calibrate(folder: Path, seconds: float) -> None:
    words = [f"server={URL}", "model=llama3_8b", "hardware=h200", "name=vllm_h200", f"output={folder}", f"seconds={seconds}"]
    subprocess.run([sys.executable, "-m", "kvsim", "calibrate", *words], check=False)


def main() -> None:
    options = parsed()
    options.output.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(options.pools.split(",")):
        pool = POOLS[name]
        began = time.monotonic()
        with server(options.command, pool, options.output / f"{name}.log"):
            print(f"{name}: ready after {time.monotonic() - began:.0f} s", flush=True)
            if options.calibrate and number == 0:
                calibrate(options.output, options.seconds)
                print(f"{name}: calibrated after {time.monotonic() - began:.0f} s", flush=True)
            for workload in workloads(options.conversations):
                if workload.name in pool.workloads and workload.name in options.workloads.split(","):
                    play(workload, options.output / name / workload.name, options.runs)


def parsed() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=Path, required=True, help="the file that workloads.py writes")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pools", default=",".join(POOLS))
    parser.add_argument("--workloads", default="conversations,sessions")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each workload")
    parser.add_argument("--command", required=True, help="starts the server on port 8000, without the number of blocks")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--seconds", type=float, default=80.0, help="time for the calibration")
    return parser.parse_args()


if __name__ == "__main__":
    main()
