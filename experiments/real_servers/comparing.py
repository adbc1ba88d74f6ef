"""Groups of recorded runs, and what ``kvsim validate`` says of each."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
POOLS = {"0.7x": "0.7x", "1x": "1x", "1.4x": "1.4x", "offload": "0.5x and 16 GiB on the host"}
"""By folder of runs: what the pool is called."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
TIMES = {
    "ttft_mean": "TTFT, mean",
    "ttft_p50": "TTFT, p50",
    "ttft_p99": "TTFT, p99",
    "tpot_mean": "TPOT, mean",
    "tpot_p99": "TPOT, p99",
    "e2e_mean": "end to end, mean",
}


class Group(NamedTuple):
    """The runs of a workload against one server."""

    engine: str
    pool: str
    workload: str
    files: Sequence[Path]


class Compared(NamedTuple):
    """A group of runs, and what ``kvsim validate`` says of them."""

    engine: str
    pool: str
    workload: str
    record: dict[str, Any]
    preemptions: int = 0
    """Those of the simulation."""

    @property
    def label(self) -> str:
        """What the pool is called; with its engine if that is not vLLM."""
        return POOLS[self.pool] if self.engine == "vllm" else f"{NAMES[self.engine]}, {POOLS[self.pool]}"


def groups(runs: Path = HERE / "runs") -> Iterator[Group]:
    """Yield the groups of runs, vLLM's first."""
    folders = {file.parent for file in runs.rglob("*.jsonl.gz")}
    found = [Group(*("vllm", *folder.relative_to(runs).parts)[-3:], sorted(folder.glob("*.jsonl.gz"))) for folder in folders]
    yield from sorted(found, key=lambda group: (group.engine != "vllm", *group[:3]))


def compare(group: Group, traces: dict[str, Sequence[str]], folder: Path) -> Compared:
    """Compare the runs of a group. Raises SystemExit if kvsim cannot."""
    engine, pool, workload, files = group
    results = f"results={','.join(map(str, files))}"
    machine = ("--config-dir", str(HERE), f"hardware=h100_{engine}", "model=llama3_8b")
    output = folder / engine / pool / workload
    words = [*machine, results, *traces[workload], f"output={output}"]
    done = subprocess.run([sys.executable, "-m", "kvsim", "validate", *words], capture_output=True, text=True, check=False)
    if not (output / "validate.json").exists():
        raise SystemExit(done.stderr)
    simulated = json.loads((output / "simulated" / "result.json").read_text())
    return Compared(engine, pool, workload, json.loads((output / "validate.json").read_text()), simulated["retractions"])


def tier_points(one: Compared) -> list[float]:
    """By how many points of the hit rate each tier's simulated part is off."""
    media = one.record["media"].values()
    prompt_tokens = sum(pair["means"][1] for pair in media) / one.record["simulated_order"]["hit_rate"]["means"][1]
    return [100 * pair["difference"] / prompt_tokens for pair in media]


def points_of(pair: dict[str, Any]) -> float:
    return 100 * (pair["means"][0] - pair["means"][1])
