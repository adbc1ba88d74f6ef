"""Does a decode step take as long as the machine's description expects, and what if its requests share their context?

Decode steps of several requests are timed one after another: with contexts of their own, and with a common beginning of the
context, whose pages all of them read. The simulation counts every token that a request attends over, shared or not; a GPU may
find shared pages in its cache.

Claims, each a row of the last table:

own        contexts of their own: at most 5 % from the expected time in every case
shared     nine tenths of the context in common: no case takes longer than with contexts of its own, beyond 2 %

    python experiments/hardware/decode_attention.py [--hardware NAME] [--output DIR]      on a machine with a GPU: a minute
    TRITON_INTERPRET=1 python experiments/hardware/decode_attention.py --tiny             on the CPU; times mean nothing there

Writes decode_attention.md, and exits with 1 if a claim fails.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import kvsim.conf
from kvsim.construct import construct
from kvsim.engine.substrate import Work
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSource
from kvsim.substrate.hardware.device import find_device

HERE = Path(__file__).resolve().parent
PAGE_TOKENS, SEED = 16, 0
REQUESTS, CONTEXTS, SHARES = (1, 2, 4, 8, 16, 32, 64), (1024, 4096, 16_384), (0.0, 0.5, 0.9)
MOST_TOKENS = 600_000
"""Context of all requests together."""
OWN_ERROR, SHARED_EXCESS = 0.05, 0.02


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


def model_name(is_tiny: bool) -> str:
    """Return the model that decodes."""
    return "tiny" if is_tiny else "llama3_8b"


def choice(group: str, name: str) -> Any:
    """Return a choice of a group of the configuration, as plain data."""
    return OmegaConf.to_container(OmegaConf.create((files(kvsim.conf) / group / f"{name}.yaml").read_text()))


def measured(hardware: HardwareSpec, *, is_tiny: bool) -> Iterator[Case]:
    """Time the cases."""
    device = find_device()  # before Triton is imported
    import numpy as np
    import torch

    from kvsim.substrate.hardware.layer import DecodeSlots
    from kvsim.substrate.hardware.stopwatch import Stopwatch
    from kvsim.substrate.hardware.transformer import Transformer
    from kvsim.substrate.simulated.compute import step_times

    model = construct(ModelSource, choice("model", model_name(is_tiny)), "model").spec()
    sizes = ((1, 2), (32, 64), MOST_TOKENS) if is_tiny else (REQUESTS, CONTEXTS, MOST_TOKENS)
    pages = -(-sizes[2] // PAGE_TOKENS) if not is_tiny else 64
    page_bytes = model.page_bytes(PAGE_TOKENS) // model.layers
    kv = torch.empty((model.layers, pages, page_bytes), dtype=torch.uint8, device=device).random_(0, 256)
    transformer = Transformer(model, kv, PAGE_TOKENS, device=device, seed=SEED)
    transformer.record_decodes(max(sizes[0]))
    expected, watch = step_times(model, hardware), Stopwatch(device, 1 if is_tiny else 9, 0.0 if is_tiny else 0.2)
    rng = np.random.default_rng(SEED)
    for requests, context, share in product(sizes[0], sizes[1], SHARES):
        if requests * context > sizes[2] or share and requests == 1:
            continue
        each = context // PAGE_TOKENS
        common = min(round(share * each), each - 1)
        order = torch.from_numpy(rng.permutation(pages).astype(np.int32)).to(device)
        own = order[common:].split(each - common)
        decodes = [DecodeSlots(context, torch.cat([order[:common], own[number]]), number) for number in range(requests)]
        seconds = watch.seconds(lambda decodes=decodes: transformer.step([], decodes))  # type: ignore[misc]
        work = Work(decode_requests=requests, decode_context_tokens=requests * context)
        expected_s = (expected.leap_s(work, 3) - expected.leap_s(work, 1)) / 2
        yield Case(requests=requests, context=context, share=share, seconds=seconds, expected_s=expected_s)


def page(cases: list[Case], made_on: str) -> tuple[str, bool]:
    """Return the text of decode_attention.md, and whether all claims hold."""
    own = {(case.requests, case.context): case for case in cases if not case.share}
    apart = max(own.values(), key=lambda case: abs(case.error))
    most = max(
        (case for case in cases if case.share == max(SHARES)),
        key=lambda case: case.seconds / own[case.requests, case.context].seconds,
    )
    excess = most.seconds / own[most.requests, most.context].seconds - 1
    claims = [
        (
            "contexts of their own",
            f"{apart.error:+.1%} with {apart.requests} requests of {apart.context:,} tokens",
            abs(apart.error) <= OWN_ERROR,
        ),
        (
            f"{max(SHARES):.0%} in common",
            f"{excess:+.1%} with {most.requests} requests of {most.context:,} tokens",
            excess <= SHARED_EXCESS,
        ),
    ]
    lines = [
        "# Decode steps", "",
        f"{made_on}, pages of {PAGE_TOKENS} tokens. Made by `python experiments/hardware/decode_attention.py`, which explains "
        "the measurement.", "",
        "| requests | context of each | expected (ms) | own contexts (ms) | error | "
        + " | ".join(f"{share:.0%} in common (ms)" for share in SHARES[1:]) + " |",
        "|---|---|---|---|---|" + "---|" * len(SHARES[1:]),
    ]  # fmt: skip
    for (requests, context), case in own.items():
        shared = {other.share: other.seconds for other in cases if (other.requests, other.context) == (requests, context)}
        times = [f"{1e3 * shared[share]:.3f}" if share in shared else "" for share in SHARES[1:]]
        row = [
            f"{requests}",
            f"{context:,}",
            f"{1e3 * case.expected_s:.3f}",
            f"{1e3 * case.seconds:.3f}",
            f"{case.error:+.1%}",
            *times,
        ]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| claim | measured | |", "|---|---|---|"]
    lines += [f"| {claim} | {found} | {'holds' if holds else '**fails**'} |" for claim, found, holds in claims]
    return "\n".join(lines) + "\n", all(holds for *_, holds in claims)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", default="h200_measured", help="the machine's description")
    parser.add_argument("--tiny", action="store_true", help="a few small cases, for the CPU")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR", help="folder for decode_attention.md")
    options = parser.parse_args(arguments)
    hardware: HardwareSpec = construct(HardwareSpec, choice("hardware", options.hardware), "hardware")
    cases = list(measured(hardware, is_tiny=options.tiny))
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "A CPU"
    text, holds = page(cases, f"{device}, `model={model_name(options.tiny)}`, expected by `hardware={options.hardware}`")
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "decode_attention.md").write_text(text)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
