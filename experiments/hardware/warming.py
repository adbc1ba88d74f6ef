"""How long does a rested GPU stay faster than a busy one?

Times equal steps with prefill, back to back for some seconds, after the GPU has been idle or has only decoded. A GPU lowers its
clock within a tenth of a second of starting work, and changes it again later. A simulation has a single time constant for this,
which ``kvsim calibrate`` fits to steps of a serving engine (``compute_curves.warming_s``), and in which decoding counts as rest.
Times are relative to those of the last second after a rest, which are those of a busy GPU.

Claims, each a row of the last table:

settled    from half a second on, a step takes as long as in the last second, within 1 %
decoding   the first step after decoding takes as long as after a rest, within 2 %

    python experiments/hardware/warming.py [--output DIR]              on a machine with a GPU: a minute and a half
    TRITON_INTERPRET=1 python experiments/hardware/warming.py --tiny   on the CPU; times mean nothing there

Writes warming.md, and exits with 1 if a claim fails.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from loaded_model import PAGE_TOKENS, Loaded, device_name, model_name, options_of, publish

from kvsim.report.study import Claim, markdown

if TYPE_CHECKING:
    from kvsim.substrate.hardware.stopwatch import Stopwatch

TOKENS, REST_S, COURSE_S, COURSES = 2048, 5.0, 6.0, 3
TINY_TOKENS, TINY_COURSE_S = 32, 0.5
BEFORE = ("rest", "decoding")
DECODES, CONTEXT = 16, 1024
"""Decoding requests before a course, and the context of each."""
BOUNDS_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, COURSE_S - 1)
"""Start of each span of time since the rest; in the last one the GPU is busy."""
SETTLED_S, MOST_DRIFT, MOST_APART = 0.5, 0.01, 0.02

Courses = Mapping[str, Sequence[Sequence[float]]]
"""Seconds of the steps of each course, by what was before."""


def measured(*, is_tiny: bool) -> dict[str, list[list[float]]]:
    """Return the seconds of consecutive steps, in several courses after each of ``BEFORE``."""
    tokens, context, requests = (TINY_TOKENS, 48, 2) if is_tiny else (TOKENS, CONTEXT, DECODES)
    loaded = Loaded.of(model_name(is_tiny), tokens + requests * context, requests)
    from kvsim.substrate.hardware.model.layer import ChunkSlots, DecodeSlots

    pages, *contexts = loaded.slots([-(-length // PAGE_TOKENS) for length in [tokens] + [context] * requests])
    chunk, watch = ChunkSlots(tokens, 0, pages), loaded.watch
    decodes = [DecodeSlots(context, slots, number) for number, slots in enumerate(contexts)]

    def prefill() -> None:
        loaded.transformer.step([chunk], [], sampled_tokens=1)

    def decode() -> None:
        loaded.transformer.step([], decodes)

    prefill()
    rest_s, course_s, courses = (0.0, TINY_COURSE_S, 1) if is_tiny else (REST_S, COURSE_S, COURSES)
    found: dict[str, list[list[float]]] = {name: [] for name in BEFORE}
    for _ in range(courses):
        found["rest"].append(course(prefill, watch, rest_s=rest_s, seconds=course_s))
        course(decode, watch, rest_s=0.0, seconds=rest_s)
        found["decoding"].append(course(prefill, watch, rest_s=0.0, seconds=course_s))
    return found


def course(action: Callable[[], object], watch: "Stopwatch", *, rest_s: float, seconds: float) -> list[float]:
    """Call ``action`` again and again, for ``seconds`` and at least once, after a rest. Return how long each call took."""
    watch.wait()
    time.sleep(rest_s)
    begin = now = time.perf_counter()
    calls: list[float] = []
    while not calls or now < begin + seconds:
        action()
        watch.wait()
        now, before = time.perf_counter(), now
        calls.append(now - before)
    return calls


def spans(courses: Sequence[Sequence[float]]) -> dict[float, float]:
    """Return the mean time of the steps that begin in each span, by the span's start; spans without a step are left out."""
    found: dict[float, list[float]] = {}
    for course in courses:
        for began_s, seconds in zip(accumulate(course, initial=0.0), course, strict=False):
            found.setdefault(max(bound for bound in BOUNDS_S if bound <= began_s), []).append(seconds)
    return {bound: statistics.fmean(times) for bound, times in sorted(found.items())}


def claims(found: Courses) -> list[Claim]:
    """Return what is claimed of a busy GPU, and of decoding."""
    rested = spans(found["rest"])
    busy_s = rested[max(rested)]
    drift = max((rested[bound] / busy_s - 1 for bound in rested if bound >= SETTLED_S), key=abs, default=0.0)
    name = f"settled: from {SETTLED_S} s on, a step takes as long as in the last second, within {MOST_DRIFT:.0%}"
    rested_s, decoded_s = (statistics.fmean(course[0] for course in found[before]) for before in BEFORE)
    apart = decoded_s / rested_s - 1
    like = f"decoding: the first step after it takes as long as after a rest, within {MOST_APART:.0%}"
    return [Claim(name, f"{drift:+.1%}", abs(drift) <= MOST_DRIFT), Claim(like, f"{apart:+.1%}", abs(apart) <= MOST_APART)]


def page(found: Courses, made_on: str) -> list[str]:
    """Return the lines of warming.md before its claims."""
    by_span = {before: spans(courses) for before, courses in found.items()}
    busy_s = by_span["rest"][max(by_span["rest"])]
    rows = [
        (before, f"from {bound:g}", f"{1e3 * seconds:.1f}", f"{seconds / busy_s:.3f}")
        for before, times in by_span.items()
        for bound, seconds in times.items()
    ]
    made_by = "Made by `python experiments/hardware/warming.py`, which explains the measurement."
    heads = ("before", "time since then (s)", "a step takes (ms)", "relative to a busy GPU")
    return ["# Rested and busy GPUs", "", f"{made_on}, {len(found['rest'])} courses each. {made_by}", "", *markdown(heads, rows)]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the table. Return the exit code."""
    options = options_of(__doc__, arguments, has_hardware=False)
    found = measured(is_tiny=options.tiny)
    tokens = TINY_TOKENS if options.tiny else TOKENS
    lines = page(found, f"{device_name()}, `model={model_name(options.tiny)}`, steps of {tokens:,} prompt tokens")
    return publish(options.output / "warming.md", lines, claims(found))


if __name__ == "__main__":
    sys.exit(main())
