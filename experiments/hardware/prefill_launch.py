"""How long does the host take to launch a step with prefill, and what does that depend on?

Times steps so short that the GPU waits for the launch of their kernels: one or more chunks, which begin or continue a prompt,
alone and beside decoding requests. The launch is the time until the last kernel has been submitted, the step the time until the
last one has ended. Both are measured first in a thread that does nothing else, then in a serving engine that answers short
questions about documents, so that most chunks are short and continue a prompt.

Claims, each a row of the last table:

description  in the serving engine, steps of each kind that occurs ten times or more take as long as expected, within 15 %: their
             launch (``prefill_launch_s`` and what further chunks and decoding requests add to it) and the overheads
serving      there, the launch of a step with one chunk that continues a prompt, beside decoding requests, takes at most 1.3
             times as long as in a thread of its own

    python experiments/hardware/prefill_launch.py [--hardware NAME] [--output DIR]      on a machine with a GPU: a minute
    TRITON_INTERPRET=1 python experiments/hardware/prefill_launch.py --tiny             on the CPU; times mean nothing there

Writes prefill_launch.md, and exits with 1 if a claim fails.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

from loaded_model import PAGE_TOKENS, Loaded, hardware_of, made_on, model_name, options_of, publish

from kvsim.cli import main as kvsim
from kvsim.hardware.spec import HardwareSpec
from kvsim.report.study import Claim, markdown

CHUNKS, STARTS, DECODES = (1, 2, 4), (0, 4096), (0, 8, 32)
TOKENS, CONTEXT = 32, 1024
"""Tokens of a chunk, and the context of a decoding request."""
USUAL = (1, STARTS[-1], 8)
"""Chunks, start and decoding requests of the step that is compared with those of the serving engine."""
MOST_ERROR, MOST_RATIO, FEWEST = 0.15, 1.3, 10
REPEATS = 15
RUN = [
    "substrate=hardware", "page_tokens=16", "trace=synthetic", "trace.seed=3", "trace.sessions=30", "trace.sessions_per_s=4",
    "trace.arrivals=closed_loop", "trace.mix.chat.weight=0", "trace.mix.agent.weight=0", "trace.mix.document.weight=1",
    "trace.mix.document.turns=12", "trace.mix.document.pause_s=1", "trace.mix.document.document_tokens=4000",
    "trace.mix.document.message_tokens=30", "trace.mix.document.answer_tokens=30", "tiers.gpu.capacity=30GiB",
]  # fmt: skip
TINY = [
    "trace.limit=8", "trace.sessions=2", "trace.mix.document.document_tokens=64", "trace.mix.document.system_tokens=16",
    "trace.mix.document.answer_tokens=2", "trace.mix.document.pause_s=0.1", "tiers.gpu.capacity=100pages",
]  # fmt: skip
"""Replaces settings of RUN, for Triton's interpreter."""
SHORT = 128
"""Most prompt tokens of a step that counts in the serving engine: the GPU computes them while their kernels are launched."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A step of some chunks, and requests that decode beside them."""

    chunks: int
    start: int
    """Position at which each chunk begins."""
    decodes: int
    launch_s: float
    step_s: float


def measured(*, is_tiny: bool) -> Iterator[Launch]:
    """Time the cases."""
    most_chunks, most_start, most_decodes = (2, 32, 2) if is_tiny else (max(CHUNKS), max(STARTS), max(DECODES))
    context = 48 if is_tiny else CONTEXT
    loaded = Loaded.of(model_name(is_tiny), most_chunks * (most_start + TOKENS) + most_decodes * context, most_decodes)
    from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots

    limits = zip((CHUNKS, STARTS, DECODES), (most_chunks, most_start, most_decodes), strict=True)
    for chunks, start, decodes in product(*(sorted({min(one, most) for one in every}) for every, most in limits)):
        lengths = [start + TOKENS] * chunks + [context] * decodes
        slots = loaded.slots([-(-length // PAGE_TOKENS) for length in lengths])
        parts = [ChunkSlots(TOKENS, start, slots[number], number) for number in range(chunks)]
        others = [DecodeSlots(context, slots[chunks + number], number) for number in range(decodes)]
        times = []
        for _ in range(2 if is_tiny else REPEATS):
            loaded.watch.wait()
            began_s = time.perf_counter()
            loaded.transformer.step(parts, others, sampled_tokens=chunks)
            launched_s = time.perf_counter()
            loaded.watch.wait()
            times.append((launched_s - began_s, time.perf_counter() - began_s))
        launch_s, step_s = (statistics.median(some) for some in zip(*times[1:], strict=True))
        yield Launch(chunks=chunks, start=start, decodes=decodes, launch_s=launch_s, step_s=step_s)


@dataclass(frozen=True, kw_only=True)
class Served:
    """Short steps of one kind in the serving engine; mean times."""

    chunks: int
    """2 for two or more."""
    continues: bool
    """Whether a chunk continues a prompt."""
    decodes: bool
    steps: int
    before_s: float
    """Before the launch: the page lists are uploaded."""
    launch_s: float
    step_s: float

    def expected_s(self, hardware: HardwareSpec) -> float:
        """Return the launch and the overheads that a description expects."""
        return hardware.launch_s(self.chunks, int(self.decodes)) + hardware.prefill_overhead_s + hardware.step_overhead_s


def served(hardware: str, *, is_tiny: bool) -> list[Served]:
    """Serve requests, and return what their short steps took in the engine's thread."""
    from kvsim.substrate.hardware.compute import Compute, Leap
    from kvsim.substrate.hardware.model.transformer import Transformer

    launches: list[tuple[float, float]] = []
    times: dict[tuple[int, bool, bool], list[tuple[float, float, float]]] = defaultdict(list)
    launch, compute = Transformer.step, Compute._compute

    def timed_launch(self: Transformer, *given: Any, **named: Any) -> Any:
        began_s = time.perf_counter()
        result = launch(self, *given, **named)
        launches.append((began_s, time.perf_counter()))
        return result

    def timed_compute(self: Compute, leap: Leap) -> int:
        launches.clear()
        began_s = time.perf_counter()
        steps = compute(self, leap)
        end_s, chunks = time.perf_counter(), leap.order.chunks
        if 0 < sum(chunk.tokens for chunk in chunks) <= SHORT:
            kind = min(len(chunks), 2), any(chunk.start for chunk in chunks), bool(leap.order.decodes)
            first_s, last_s = launches[0]
            times[kind].append((first_s - began_s, last_s - first_s, end_s - began_s))
        return steps

    changes = TINY if is_tiny else []
    names = {change.split("=")[0] for change in changes}
    settings = [setting for setting in RUN if setting.split("=")[0] not in names]
    settings += [*changes, f"hardware={hardware}", f"model={model_name(is_tiny)}"]
    with (
        patch.object(Transformer, "step", timed_launch),
        patch.object(Compute, "_compute", timed_compute),
        tempfile.TemporaryDirectory() as folder,
    ):
        if kvsim(["simulate", *settings, f"output={folder}/run"]):
            raise SystemExit(2)
    found = []
    for (chunks, continues, decodes), some in sorted(times.items()):
        before_s, launch_s, step_s = (statistics.fmean(column) for column in zip(*some, strict=True))
        found.append(
            Served(
                chunks=chunks, continues=continues, decodes=decodes, steps=len(some),
                before_s=before_s, launch_s=launch_s, step_s=step_s,
            )
        )  # fmt: skip
    return found


def claims(rows: list[Launch], serving: list[Served], hardware: HardwareSpec) -> list[Claim]:
    """Return what is claimed of the steps in the serving engine."""
    errors = [kind.expected_s(hardware) / kind.step_s - 1 for kind in serving if kind.steps >= FEWEST]
    worst = max(errors, key=abs, default=None)
    usual = next((row for row in rows if (row.chunks, row.start, row.decodes) == USUAL), rows[-1])
    alike = [row.launch_s / usual.launch_s for row in serving if (row.chunks, row.continues, row.decodes) == (1, True, True)]
    return [
        Claim(
            f"description: steps of each kind in the serving engine take as long as expected, within {MOST_ERROR:.0%}",
            "there was none" if worst is None else f"{worst:+.1%}",
            worst is not None and abs(worst) <= MOST_ERROR,
        ),
        Claim(
            f"serving: there, launches beside decoding requests take at most {MOST_RATIO} times as long",
            f"{alike[0]:.2f}" if alike else "there was none",
            bool(alike) and alike[0] <= MOST_RATIO,
        ),
    ]


def page(rows: list[Launch], serving: list[Served], hardware: HardwareSpec, made_on: str) -> list[str]:
    """Return the lines of prefill_launch.md before its claims."""
    alone = [
        (f"{row.chunks}", f"{row.start:,}", f"{row.decodes}", f"{1e3 * row.launch_s:.2f}", f"{1e3 * row.step_s:.2f}")
        for row in rows
    ]
    engine = []
    for kind in serving:
        answers = ["yes" if one else "no" for one in (kind.continues, kind.decodes)]
        times = [f"{1e3 * seconds:.2f}" for seconds in (kind.before_s, kind.launch_s, kind.step_s, kind.expected_s(hardware))]
        number = "2 or more" if kind.chunks > 1 else "1"
        engine.append((number, *answers, f"{kind.steps}", *times))
    means = ("before (ms)", "launch (ms)", "step (ms)", "expected (ms)")
    kinds = ("chunks", "one continues a prompt", "decoding requests", "steps", *means)
    return [
        "# Launch of steps with prefill", "",
        f"{made_on}, pages of {PAGE_TOKENS} tokens, chunks of {TOKENS} tokens. Made by "
        "`python experiments/hardware/prefill_launch.py`, which explains the measurement.", "",
        *markdown(("chunks", "each begins at", "decoding requests", "launch (ms)", "step (ms)"), alone), "",
        f"In the serving engine, steps of at most {SHORT} prompt tokens (for two or more chunks, two are expected):", "",
        *markdown(kinds, engine),
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the table. Return the exit code."""
    options = options_of(__doc__, arguments)
    rows, serving = list(measured(is_tiny=options.tiny)), served(options.hardware, is_tiny=options.tiny)
    hardware = hardware_of(options.hardware)
    lines = page(rows, serving, hardware, made_on(options))
    return publish(options.output / "prefill_launch.md", lines, claims(rows, serving, hardware))


if __name__ == "__main__":
    sys.exit(main())
