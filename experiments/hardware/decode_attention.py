"""Does a decode step take as long as the machine's description expects, and what if its requests share their context?

Decode steps of several requests are timed one after another: with contexts of their own, and with a common beginning of the
context, whose pages all of them read, so that the GPU finds some of them in its cache.

Claims, each a row of the last table:

own        contexts of their own: at most 5 % from the expected time in every case
shared     a half or nine tenths of the context in common: at most 10 %

    python experiments/hardware/decode_attention.py [--hardware NAME] [--output DIR]      on a machine with a GPU: a minute
    TRITON_INTERPRET=1 python experiments/hardware/decode_attention.py --tiny             on the CPU; times mean nothing there

Writes decode_attention.md, and exits with 1 if a claim fails.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

from loaded_model import PAGE_TOKENS, Loaded, hardware_of, made_on, model_name, options_of, publish

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.report.study import Claim, markdown

REQUESTS, CONTEXTS, SHARES = (1, 2, 4, 8, 16, 32, 64), (1024, 4096, 16_384), (0.0, 0.5, 0.9)
MOST_TOKENS = 600_000
"""Context of all requests together."""
MOST_ERRORS = {False: 0.05, True: 0.1}
"""By whether requests share context."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decode step of some requests."""

    requests: int
    context: int
    """Tokens of each."""
    share: float
    """Part of the context that all have in common, from its beginning."""
    seconds: float
    expected_s: float

    @property
    def error(self) -> float:
        return self.expected_s / self.seconds - 1


def measured(hardware: HardwareSpec, *, is_tiny: bool) -> Iterator[Case]:
    """Time the cases."""
    counts, contexts, most_tokens = ((1, 2), (32, 64), 1024) if is_tiny else (REQUESTS, CONTEXTS, MOST_TOKENS)
    loaded = Loaded.of(model_name(is_tiny), most_tokens, max(counts))
    import torch

    from kvsim.substrate.hardware.model.layer import DecodeSlots
    from kvsim.substrate.simulated.compute import step_times

    expected = step_times(loaded.model, hardware)
    for requests, context, share in product(counts, contexts, SHARES):
        if requests * context > most_tokens or share and requests == 1:
            continue
        each = context // PAGE_TOKENS
        common = min(round(share * each), each - 1)
        shared, *own = loaded.slots([common] + [each - common] * requests)
        decodes = [DecodeSlots(context, torch.cat([shared, rest]), number) for number, rest in enumerate(own)]
        seconds = loaded.watch.seconds(partial(loaded.transformer.step, [], decodes))
        work = Work(decode_requests=requests, decode_context_tokens=requests * context)
        work.repeated_context_tokens = (requests - 1) * common * PAGE_TOKENS
        expected_s = (expected.leap_s(work, 3) - expected.leap_s(work, 1)) / 2
        yield Case(requests=requests, context=context, share=share, seconds=seconds, expected_s=expected_s)


def claims(cases: list[Case]) -> list[Claim]:
    """Return what is claimed of contexts of their own, and of contexts that requests have in common."""
    found = []
    for is_shared, most in MOST_ERRORS.items():
        worst = max((case for case in cases if (case.share > 0) == is_shared), key=lambda case: abs(case.error))
        name = "context in common" if is_shared else "contexts of their own"
        text = f"{worst.error:+.1%} with {worst.requests} of {worst.context:,} tokens"
        found.append(Claim(f"{name}: at most {most:.0%} from the expected time", text, abs(worst.error) <= most))
    return found


def page(cases: list[Case], made_on: str) -> list[str]:
    """Return the lines of decode_attention.md before its claims."""
    rows = [
        (
            f"{case.requests}", f"{case.context:,}", f"{case.share:.0%}", f"{1e3 * case.expected_s:.3f}",
            f"{1e3 * case.seconds:.3f}", f"{case.error:+.1%}",
        )
        for case in cases
    ]  # fmt: skip
    heads = ("requests", "context of each", "in common", "expected (ms)", "measured (ms)", "error")
    made_by = "Made by `python experiments/hardware/decode_attention.py`, which explains the measurement."
    return ["# Decode steps", "", f"{made_on}, pages of {PAGE_TOKENS} tokens. {made_by}", "", *markdown(heads, rows)]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the table. Return the exit code."""
    options = options_of(__doc__, arguments)
    cases = list(measured(hardware_of(options.hardware), is_tiny=options.tiny))
    return publish(options.output / "decode_attention.md", page(cases, made_on(options)), claims(cases))


if __name__ == "__main__":
    sys.exit(main())
