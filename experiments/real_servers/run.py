"""Does a simulation show what a running server does? Recorded runs of servers, compared request by request.

``serve.py`` played conversations of the Mooncake trace and generated sessions (``workloads.py``) against vLLM servers with pools
of several sizes on an H100, three times each, and measured the steps of one; ``runs/POOL/WORKLOAD`` has what its client saw.
Those of another engine are in ``runs/ENGINE/POOL/WORKLOAD``. Each group of runs is compared as ``kvsim validate results=FILES``
does. The machine of the simulations is ``hardware/h100_ENGINE.yaml``, fitted by ``kvsim calibrate`` to the measured steps
alone, not to the runs.

Claims on vLLM, the first two for the pool on the GPU alone:

1. given the order in which the server admitted requests, every request finds the cached tokens that kvsim says;
2. simulated hit rates are within .05 points of the server's;
3. those of each tier, with memory on the host, are within .42 points;
4. simulated mean TTFTs are within 2.4%, mean TPOTs within 1.6%.

And on SGLang:

5. in its order, every request finds the cached tokens that kvsim says;
6. simulated hit rates are within .3 points, mean TTFTs within 3%, mean TPOTs within 5%.

Exits with 1 if a claim fails.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from comparing import TIMES, Compared, compare, groups, points_of, tier_points
from page import page, picture
from steps import steps_of_group
from workloads import conversations, read_rows, workloads

from kvsim.report.study import CONVERSATION, Claim, option_parser, write_figure, write_page

ON_GPU = ("0.7x", "1x", "1.4x")
MOST_POINTS, MOST_TIER_POINTS = 0.05, 0.42
MOST_TIMES = {"ttft_mean": 0.024, "tpot_mean": 0.016}
SGLANG_POINTS = 0.3
SGLANG_TIMES = {"ttft_mean": 0.03, "tpot_mean": 0.05}


def claims(compared: Sequence[Compared]) -> list[Claim]:
    found = [one for one in compared if one.engine == "vllm"]
    on_gpu = [one for one in found if one.pool in ON_GPU]
    alone = "with memory on the GPU alone"
    differing, with_host = (
        max(count for one in group for count in one.record["given_order"]["differing"])
        for group in (on_gpu, [one for one in found if one.pool not in ON_GPU])
    )
    points = max(abs(points_of(one.record["simulated_order"]["hit_rate"])) for one in on_gpu)
    by_tier = max(abs(value) for one in found if one.pool not in ON_GPU for value in tier_points(one))
    return [
        Claim(
            f"{alone} and the server's order, no request finds other cached tokens",
            f"{differing} in the worst run",
            not differing,
        ),
        Claim("nor does one with memory on the host", f"{with_host} in the worst run", not with_host),
        Claim(f"{alone}, simulated hit rates are within {MOST_POINTS} points", f"{points:.2f} points", points <= MOST_POINTS),
        Claim(
            f"those of each tier, with the host's, are within {MOST_TIER_POINTS} points",
            f"{by_tier:.2f} points",
            by_tier <= MOST_TIER_POINTS,
        ),
        *[time_claim(found, name, most) for name, most in MOST_TIMES.items()],
        *sglang_claims([one for one in compared if one.engine == "sglang"]),
    ]


def sglang_claims(found: Sequence[Compared]) -> Iterator[Claim]:
    """Yield what is claimed of the groups of SGLang's runs."""
    differing = max(count for one in found for count in one.record["given_order"]["differing"])
    yield Claim("SGLang: given its order, no request finds other cached tokens", f"{differing} in the worst run", not differing)
    points = max(abs(points_of(one.record["simulated_order"]["hit_rate"])) for one in found)
    yield Claim(f"SGLang: simulated hit rates are within {SGLANG_POINTS} points", f"{points:.2f} points", points <= SGLANG_POINTS)
    for name, most in SGLANG_TIMES.items():
        claim = time_claim(found, name, most)
        yield claim._replace(text=f"SGLang: {claim.text}")


def time_claim(found: Sequence[Compared], name: str, most: float) -> Claim:
    error = max(abs(one.record["times"][name]["error"]) for one in found)
    return Claim(f"{TIMES[name]}, is within {most:.1%}", f"{error:.1%} in the worst group", error <= most)


def main() -> int:
    parser = option_parser(__file__, __doc__, {"conversation": CONVERSATION})
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        chosen = folder / "conversations.jsonl"
        chosen.write_text("".join(json.dumps(row) + "\n" for row in conversations(read_rows(Path(options.conversation)))))
        traces = {one.name: one.settings for one in workloads(chosen)}
        made = list(groups())
        found = [compare(group, traces, folder) for group in made]
        taken = [
            steps_of_group(group, one, traces[group.workload])
            for group, one in zip(made, found, strict=True)
            if group.engine == "vllm"
        ]
    print(write_page(options.output, page(found, claims(found), taken)))
    write_figure(options.output, picture(found))
    return int(not all(claim.holds for claim in claims(found)))


if __name__ == "__main__":
    sys.exit(main())
