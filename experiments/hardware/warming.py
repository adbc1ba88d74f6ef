"""How long does a rested GPU stay faster than a busy one?

Equal steps with prefill follow each other for some seconds, after the GPU has rested, or has only decoded. It lowers its clock
within a tenth of a second, when work begins, and perhaps again when it gets warm; a simulation knows the first
(``compute_curves.rested_prefill_share`` and ``warming_s``), and assumes that decoding is a rest. Times are relative to those of
the last second after a rest, which are those of a busy GPU.

Claims, each a row of the last table:

slow       from half a second on, steps take within 1 % of their time in the last second
rested     the first step takes as long as the machine's description expects of a rested GPU, within 2 %
decoding   the same after decoding

    python experiments/hardware/warming.py [--hardware NAME] [--output DIR]      on a machine with a GPU: a minute and a half
    TRITON_INTERPRET=1 python experiments/hardware/warming.py --tiny             on the CPU; times mean nothing there

Writes warming.md, and exits with 1 if a claim fails.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from loaded_model import PAGE_TOKENS, Loaded, device_name, hardware_of, model_name  # noqa: E402

from kvsim.hardware import HardwareSpec  # noqa: E402
from kvsim.substrate.simulated.warmth import Warmth  # noqa: E402

TOKENS, REST_S, COURSE_S, COURSES = 2048, 5.0, 6.0, 3
TINY_TOKENS, TINY_COURSE_S = 32, 0.5
BEFORE = ("rest", "decoding")
DECODES, CONTEXT = 16, 1024
"""Decoding requests before a course, and the context of each."""
BOUNDS_S = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, COURSE_S - 1)
"""Begin of each span of time since the rest; the last one is that of a busy GPU."""
SLOW_FROM_S, MOST_SLOW, MOST_FAST = 0.5, 0.01, 0.02


def measured(*, is_tiny: bool) -> dict[str, list[list[float]]]:
    """Return the seconds of consecutive steps, in several courses after each kind of what was before."""
    tokens, context, requests = (TINY_TOKENS, 48, 2) if is_tiny else (TOKENS, CONTEXT, DECODES)
    loaded = Loaded.of(model_name(is_tiny), tokens + requests * context, requests)
    from kvsim.substrate.hardware.layer import ChunkSlots, DecodeSlots

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
        found["rest"].append(watch.course(prefill, rest_s=rest_s, seconds=course_s))
        watch.course(decode, rest_s=0.0, seconds=rest_s)
        found["decoding"].append(watch.course(prefill, rest_s=0.0, seconds=course_s))
    return found


def spans(courses: Sequence[Sequence[float]]) -> dict[float, float]:
    """Return the mean time of the steps that begin in each span, by the span's begin; spans without a step are left out."""
    found: dict[float, list[float]] = {}
    for course in courses:
        for began_s, seconds in zip(accumulate(course, initial=0.0), course, strict=False):
            found.setdefault(max(bound for bound in BOUNDS_S if bound <= began_s), []).append(seconds)
    return {bound: statistics.fmean(times) for bound, times in sorted(found.items())}


def page(found: Mapping[str, Sequence[Sequence[float]]], hardware: HardwareSpec, made_on: str) -> tuple[str, bool]:
    """Return the text of warming.md, and whether all claims hold."""
    by_span = {name: spans(courses) for name, courses in found.items()}
    rested = by_span["rest"]
    busy_s = rested[max(rested)]
    slowest = max((rested[bound] / busy_s - 1 for bound in rested if bound >= SLOW_FROM_S), key=abs, default=0.0)
    claims = [(f"from {SLOW_FROM_S} s on, relative to a busy GPU", slowest, MOST_SLOW)]
    for name, courses in found.items():
        first_s = statistics.fmean(course[0] for course in courses)
        error = Warmth(hardware).prefill_s(0.0, busy_s) / first_s - 1
        claims.append((f"expected time of the first step after {name}", error, MOST_FAST))
    lines = [
        "# Rested and busy GPUs", "",
        f"{made_on}, {len(found['rest'])} courses each. Made by `python experiments/hardware/warming.py`.", "",
        "| before | time since then (s) | a step takes (ms) | relative to a busy GPU |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, times in by_span.items():
        lines += [
            f"| {name} | from {bound:g} | {1e3 * seconds:.1f} | {seconds / busy_s:.3f} |" for bound, seconds in times.items()
        ]
    lines += ["", "| claim | measured | at most | |", "|---|---|---|---|"]
    for claim, error, most in claims:
        lines.append(f"| {claim} | {error:+.1%} | {most:.0%} | {'holds' if abs(error) <= most else '**fails**'} |")
    return "\n".join(lines) + "\n", all(abs(error) <= most for _, error, most in claims)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200_measured", help="the machine's description")
    parser.add_argument("--tiny", action="store_true", help="one short course, for the CPU")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR", help="folder for warming.md")
    options = parser.parse_args(arguments)
    found = measured(is_tiny=options.tiny)
    tokens = TINY_TOKENS if options.tiny else TOKENS
    made_on = (
        f"{device_name()}, `model={model_name(options.tiny)}`, steps of {tokens:,} prompt tokens, `hardware={options.hardware}`"
    )
    text, holds = page(found, hardware_of(options.hardware), made_on)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "warming.md").write_text(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
