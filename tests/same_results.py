"""Whether kvsim has the same results in pure Python and compiled: `write FOLDER` in each form, then `compare ONE OTHER`.

All numbers that a run leaves are compared, to the last bit, but what differs from run to run: versions and wall times.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from kvsim.cli import main
from kvsim.installation import build_name

THREE_TIERS = ["tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=10GiB", "tiers.disk.capacity=60GiB"]
RUNS = {
    "write_back": ["simulate", *THREE_TIERS, "placement=write_back", "prefetch=threshold"],
    "exclusive": ["simulate", *THREE_TIERS, "placement=exclusive", "prefetch=adaptive", "eviction=gdsf"],
    "replay_disk_below_gpu": ["replay", *THREE_TIERS, "tiers.disk.below=gpu", "eviction=arc"],
    "hybrid": ["simulate", "model=jamba_1_5_mini", "tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=10GiB", "checkpoint=branch"],
    "vllm_plus": ["simulate", "preset=vllm_plus", "tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=10GiB"],
    "replay_vllm_offload": ["replay", "preset=vllm_offload", "tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=10GiB"],
    "replay_sglang_hicache": ["replay", "preset=sglang_hicache", "tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=10GiB"],
    "replay_lfu": ["replay", *THREE_TIERS, "eviction=lfu", "placement=write_through_selective"],
    "replay_belady": ["replay", "tiers.gpu.capacity=4GiB", "eviction=belady"],
    "replay_sglang_mamba": ["replay", "preset=sglang_mamba", "model=qwen3_next_80b", "tiers.gpu.capacity=10GiB"],
    "replay_vllm_hybrid": ["replay", "preset=vllm_hybrid", "tiers.gpu.capacity=4GiB"],
    "replay_lightllm_hybrid": ["replay", "preset=lightllm_hybrid", "tiers.gpu.capacity=1GiB", "replay.prefill_chunk_tokens=512"],
    "fastdeploy": ["simulate", "preset=fastdeploy", *THREE_TIERS, "rules.cache_output=true"],
    "replay_fastdeploy": ["replay", "preset=fastdeploy", "tiers.gpu.capacity=4GiB"],
    "replay_lightllm": ["replay", "preset=lightllm", "tiers.gpu.capacity=4GiB", "tiers.cpu.capacity=10GiB"],
}
OF_THE_RUN = {"command_line", "config_hash", "load_s", "requests_per_s", "versions", "wall_s"}
"""What says nothing about hits and times. Throughput per simulated second has the same name as requests per real second."""


def write(folder: Path) -> None:
    for name, words in RUNS.items():
        code = main([words[0], "trace=synthetic", "trace.sessions=100", *words[1:], f"output={folder / name}"])
        if code:
            sys.exit(f"{name} ended with {code}")
    (folder / "form").write_text(build_name())


def compare(one: Path, other: Path) -> None:
    forms = [(folder / "form").read_text() for folder in (one, other)]
    if forms[0] == forms[1]:
        sys.exit(f"{one} and {other} are both {forms[0]}")
    for name in RUNS:
        records, requests = zip(*(results(folder / name) for folder in (one, other)), strict=True)
        if differing := sorted(key for key in records[0].keys() | records[1] if records[0].get(key) != records[1].get(key)):
            sys.exit(f"{name}: results differ: " + ", ".join(f"{key}: {[r.get(key) for r in records]}" for key in differing))
        if requests[0] != requests[1]:
            sys.exit(f"{name}: requests.csv.gz differs")
    print(f"{len(RUNS)} runs have the same results in both forms")


def results(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What must be the same: numbers of the whole run, and of each request."""
    record = json.loads((folder / "result.json").read_text())
    record["config"].pop("output", None)
    return {key: value for key, value in record.items() if key not in OF_THE_RUN}, gzip.decompress(
        (folder / "requests.csv.gz").read_bytes()
    )


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    elif len(sys.argv) > 3 and sys.argv[1] == "compare":
        compare(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
