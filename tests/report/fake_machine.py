"""A machine that plays real runs: the simulated substrate with noise, perhaps other than what the simulation takes it for."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hydra

from kvsim.hardware.noise import Noise, Variation
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.copies import copied
from kvsim.report.validation.recording import Recording, recorded
from kvsim.report.validation.repeated import compare_repeated
from kvsim.results.result import RunRecord
from kvsim.results.tolerances import Tolerances
from kvsim.run.execute import execute

FOUND = {"device": "NVIDIA H200", "verified_pages": 9, "wrong_words": 0, "wrong_pages": 0, "disk_faults": {}}
HEAVY = [[0, 0.9], [0.25, 0.98], [0.5, 1.0], [0.9, 1.05], [0.99, 1.5], [1, 4.0]]
"""A tail as of a host that is sometimes busy with something else."""
STEPS, LINKS = Variation(each=HEAVY, run=0.02, correlation=0.3), Variation(each=HEAVY, run=0.1)
NOISE = Noise(
    decode_steps=STEPS, prefill_steps=STEPS, launches=STEPS, loads=LINKS, stores=LINKS, disk_reads=LINKS, disk_writes=LINKS
)
SETTINGS = (
    "trace=synthetic", "trace.sessions=20", "trace.limit=60", "trace.sessions_per_s=4", "model=llama3_8b",
    "hardware=h200_measured", "tiers.gpu.capacity=5GiB", "tiers.cpu.capacity=5GiB", "tiers.disk.capacity=20GiB",
    "placement=write_back", "prefetch=threshold",
)  # fmt: skip


@cache
def plan() -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[*SETTINGS])
    return build_run(cfg, command="simulate", overrides=SETTINGS)


def play(seed: int, *, noise: Noise | None = NOISE, substrate: str = "simulated", **machine: Any) -> Recording:
    """Serve 60 requests with the noise of this seed; ``machine`` changes the hardware."""
    one = plan()
    config = one.config | {"substrate": substrate}
    if noise is not None:
        noise = replace(noise, seed=seed)
        config["hardware"] = config["hardware"] | {"noise": {"seed": seed}}
    own = replace(
        one,
        tiers=[replace(tier, eviction=copied(tier.eviction), placement=copied(tier.placement)) for tier in one.tiers],
        prefetch=copied(one.prefetch),
        hardware=replace(one.hardware, noise=noise, **machine),
        config=config,
        output=Path(substrate),
    )
    result = execute("simulate", own)
    if substrate == "hardware":
        result.record["hardware"] = FOUND
    return recorded(f"{substrate}/{seed}", result.record, result.outcome)


def real(seed: int, **machine: Any) -> Recording:
    return play(seed, substrate="hardware", **machine)


def validated(simulated: list[Recording], measured: list[Recording], **tolerances: float) -> RunRecord:
    return compare_repeated(simulated, measured, Tolerances(**tolerances), "kvsim validate")


def figures(record: RunRecord) -> dict[str, dict[str, Any]]:
    return {figure["name"]: figure for figure in record["figures"]}
