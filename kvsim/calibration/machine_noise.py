"""Measures the noise of this machine: repeated identical steps, launches, copies, reads and writes, in several rounds."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.calibration.disk_rates import DiskRates
from kvsim.calibration.engine_overhead import LONG_TOKENS, SHORT_TOKENS, Course, play
from kvsim.calibration.link_rates import LinkRates
from kvsim.calibration.variation import varied
from kvsim.engine.recorder import Batch
from kvsim.hardware.copy_rule import CopyRule
from kvsim.hardware.noise import Noise
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.hardware.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
FIRST = 3
"""Durations of each kind that are left out of a measurement: kernels are loaded and memory is touched then."""
DISK_THREADS = 4
"""Concurrent requests, as in a run by default."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What is repeated. Each round begins anew: with the engine's memory and weights, the pinned memory, and the disk file."""

    rounds: int = 5
    prompts: int = 80
    """Short and long prompts in turn, each followed by one decode step."""
    long_tokens: int = LONG_TOKENS
    pause_s: float = 0.05
    """Idle time between an answer and the next prompt."""
    repeats: int = 60
    """Copies, reads and writes of each kind in a round."""
    copy_bytes: int = 64 * MIB
    pool_bytes: int = 256 * MIB
    disk_bytes: int = 32 * MIB

    @property
    def course(self) -> Course:
        return Course(
            together=0, joining=(), single=self.prompts, single_output_tokens=(2,),
            pause_s=self.pause_s, long_tokens=self.long_tokens,
        )  # fmt: skip


INTERPRETED = Rounds(
    rounds=2,
    prompts=14,
    long_tokens=64,
    pause_s=0.0,
    repeats=4,
    copy_bytes=8 << 10,
    pool_bytes=64 << 10,
    disk_bytes=64 << 10,
)
"""For Triton's interpreter."""

Times = dict[str, list[float]]
"""Durations of identical actions, in order, by the attribute of ``Noise``."""


def measured_noise(
    model: ModelSpec,
    hardware: HardwareSpec,
    page_tokens: int,
    folder: Path,
    *,
    device: "torch.device",
    seed: int,
    say: Callable[[str], None],
) -> Noise:
    """Measure the noise of this machine and of the disk at ``folder``.

    Raises UsageError if model and pages do not fit the machine, and OSError if the disk is full.
    """
    rounds = Rounds() if device.type == "cuda" else INTERPRETED
    found: list[Times] = []
    for number in range(rounds.rounds):
        say(f"measuring noise, round {number + 1} of {rounds.rounds}")
        batches = play(rounds.course, model, hardware, page_tokens, device, seed).batches
        times = step_times(batches, rounds.long_tokens)
        times |= link_times(model, hardware.copy_rule, page_tokens, rounds, device, seed + number)
        found.append(times | disk_times(model, page_tokens, rounds, folder, seed))
    kinds: dict[str, Any] = {kind: varied([times[kind][FIRST:] for times in found]) for kind in found[0]}
    return Noise(**kinds)


def step_times(batches: Iterable[Batch], long_tokens: int) -> Times:
    """Return the durations of identical steps: long prompts, the decode steps that follow them, and short prompts.

    A short prompt takes as long as the launch of its kernels.
    """
    times: Times = {"decode_steps": [], "prefill_steps": [], "launches": []}
    of_prompts = {SHORT_TOKENS: "launches", long_tokens: "prefill_steps"}
    for batch in batches:
        duration_s = batch.end_s - batch.start_s
        if batch.prefill_requests == 1 and not batch.decode_requests:
            times[of_prompts[batch.prefill_tokens]].append(duration_s)
        elif not batch.prefill_requests and batch.decode_requests == 1 and batch.decode_context_tokens >= long_tokens:
            times["decode_steps"].append(duration_s / batch.steps)
    return times


def link_times(
    model: ModelSpec, rule: CopyRule | None, page_tokens: int, rounds: Rounds, device: "torch.device", seed: int
) -> Times:
    """Return the durations of identical copies in both directions, by this rule, between pages in random places."""
    fragment_bytes = model.page_bytes(page_tokens) // model.attention_layers
    pool_bytes = max(rounds.pool_bytes, model.page_bytes(page_tokens))
    with LinkRates(Stopwatch(device, 1), layers=model.attention_layers, pool_bytes=pool_bytes, seed=seed) as link:
        link.rule = rule or link.rule
        loads, stores = link.repeated(fragment_bytes, rounds.copy_bytes, FIRST + rounds.repeats)
    return {"loads": loads, "stores": stores}


def disk_times(model: ModelSpec, page_tokens: int, rounds: Rounds, folder: Path, seed: int) -> Times:
    """Return the durations of identical reads and writes."""
    page_bytes = model.page_bytes(page_tokens)
    disk = DiskRates(folder, most_bytes=max(rounds.disk_bytes, page_bytes), most_pages=1, seed=seed)
    reads, writes = disk.repeated(page_bytes, DISK_THREADS, rounds.disk_bytes, FIRST + rounds.repeats)
    return {"disk_reads": reads, "disk_writes": writes}
