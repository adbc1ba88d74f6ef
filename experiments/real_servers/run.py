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

5. in its order, at most 5% of the requests find other cached tokens, and hit rates are within .1 points;
6. simulated hit rates are within .3 points, mean TTFTs within 3%, mean TPOTs within 5%.

Exits with 1 if a claim fails.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import plotly.graph_objects as go
from workloads import conversations, read_rows, workloads

from kvsim.report.study import CONVERSATION, Claim, markdown, opening, option_parser, write_figure, write_page

HERE = Path(__file__).resolve().parent
POOLS = {"0.7x": "0.7x", "1x": "1x", "1.4x": "1.4x", "offload": "0.5x and 16 GiB on the host"}
"""By folder of runs: what the pool is called."""
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
ON_GPU = ("0.7x", "1x", "1.4x")
MOST_POINTS, MOST_TIER_POINTS = 0.05, 0.42
MOST_TIMES = {"ttft_mean": 0.024, "tpot_mean": 0.016}
SGLANG_POINTS = {"given_order": 0.1, "simulated_order": 0.3}
SGLANG_TIMES = {"ttft_mean": 0.03, "tpot_mean": 0.05}
MOST_DIFFERING = 0.05
TIMES = {
    "ttft_mean": "TTFT, mean",
    "ttft_p50": "TTFT, p50",
    "ttft_p99": "TTFT, p99",
    "tpot_mean": "TPOT, mean",
    "tpot_p99": "TPOT, p99",
    "e2e_mean": "end to end, mean",
}

TIMES_TEXT = """\
Error of the simulation, and in brackets the spread of the server's own runs. The machine was measured hours apart from the
runs, perhaps on another H100, and its short steps with prompts beside decoding requests vary by 5 to 12%. In one run of each of
three groups, the times of all tokens were compared with the machine's steps: those of up to 4,096 prompt tokens beside decoding
requests are 1 to 13 ms too long in the mean; full steps of 8,192 tokens in a row are 1 to 4% too short, and 6 to 9% in
conversations with 1x, where requests are preempted. In part, these errors cancel. Near what the server can take, waiting
multiplies them: there, 1% of a step is several percent of the mean TTFT. With memory on the host, the server preempts far more
often than the simulation, whose p99 of TPOT is that of one request with a short answer.

An earlier calibration, without full steps beside decoding requests and without shared contexts, is off in mean TTFTs by -16.8%,
-10.4% and -11.3% in sessions with 0.7x, 1x and 1.4x, by +0.6%, -8.1% and -7.1% in conversations, and by +3.0% with memory on the
host; in mean TPOTs by -8.7% to +3.6%.

Two choices were made after a look at these runs, though their numbers come from the calibration alone. Of context that decoding
requests share, a GPU reads only as much faster as its cache holds (`repeated_context_bytes`, 31 MB of a layer): with one share
for all contexts, the mean TTFT of conversations is -16.2% and -17.3% off with 1x and 1.4x. And held-out batches count alike
when they choose the model: in multiples of their noise they would choose the roofline, which is off by -28.0% to +3.2%."""


SGLANG_TEXT = """\
What is claimed of SGLang was written down after a look at its runs; what is claimed of vLLM are figures that other
simulators have published. SGLang 0.5.15 played conversations with one pool, twice: more did not fit into the time on the
machine. Its flags: Triton's attention, PyTorch's sampling, pages of 16 tokens, chunks of 8,192, first come first served, the
overlapping loop, no mixed chunks, LRU. It has not retracted a request.

**In its order.** SGLang takes requests into its queue only between steps, and says how long they were in the queue from then
on. A prompt can be found when its first token has been sent, and a chunk of one already when the next step is formed. Steps
that compute nothing but a chunk of a long prompt send no token, so a client does not see them. The requests that differ,
three in both runs and four more in one, find another part of a prompt whose chunks are being computed. By the server's log,
each of the 75 steps with prompts of the first run has as many prompt tokens and cached ones as kvsim's rules give it.

**Times.** Triton's attention over cached context (`extend_attention.py`) starts as many blocks of queries for each prompt of
a step as the longest of them has, and none ends early: with a chunk of 648 tokens after 25,600 cached ones beside one of
4,712, a step of 8,176 tokens took 719 ms. By the sum of its parts that would be 250 ms, and padded so 638 ms (`pads_chunks`).
Without it, mean TTFTs were simulated 37% too short, and mean TPOTs 19%. It is known from the source, not fitted: no batch of
the calibration shows it. Against the server's log, full steps of one prompt are 16% too short to 8% too long, and steps of
fewer than 3,000 prompt tokens mostly 20 to 40% too short. What the machine does not have: to decode one request after 16,384
tokens takes 12.3 ms, and 29% less by the file, because Triton splits a context into 8 parts at most, while kvsim goes by the
tokens of all requests together. The batch held out that is 59% off, 64 decoding requests and a prompt of 432 tokens, could be
read in one of its two plays alone."""


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
    return Compared(engine, pool, workload, json.loads((output / "validate.json").read_text()))


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
    differing = max(count / one.record["compared"] for one in found for count in one.record["given_order"]["differing"])
    yield Claim(
        f"SGLang: given its order, at most {MOST_DIFFERING:.0%} of the requests find other cached tokens",
        f"{differing:.1%} in the worst run",
        differing <= MOST_DIFFERING,
    )
    for order, name in (("given_order", "hit rates in its order"), ("simulated_order", "simulated hit rates")):
        points, most = max(abs(points_of(one.record[order]["hit_rate"])) for one in found), SGLANG_POINTS[order]
        yield Claim(f"SGLang: {name} are within {most} points", f"{points:.2f} points", points <= most)
    for name, most in SGLANG_TIMES.items():
        claim = time_claim(found, name, most)
        yield claim._replace(text=f"SGLang: {claim.text}")


def time_claim(found: Sequence[Compared], name: str, most: float) -> Claim:
    error = max(abs(one.record["times"][name]["error"]) for one in found)
    return Claim(f"{TIMES[name]}, is within {most:.1%}", f"{error:.1%} in the worst group", error <= most)


def tier_points(one: Compared) -> list[float]:
    """By how many points of the hit rate each tier's simulated part is off."""
    media = one.record["media"].values()
    prompt_tokens = sum(pair["means"][1] for pair in media) / one.record["simulated_order"]["hit_rate"]["means"][1]
    return [100 * pair["difference"] / prompt_tokens for pair in media]


def points_of(pair: dict[str, Any]) -> float:
    return 100 * (pair["means"][0] - pair["means"][1])


def page(found: Sequence[Compared]) -> list[str]:
    servers = sorted({(one.record["server"]["engine"], one.record["server"]["version"]) for one in found}, reverse=True)
    names = " and ".join(f"{NAMES[engine]} {version}" for engine, version in servers)
    return [
        *opening(
            f"Against a running {' and a running '.join(dict.fromkeys(NAMES[engine] for engine, _ in servers))}",
            [
                f"{names} with shapes of Llama 3 8B and random weights on an H100, played by kvsim's client;",
                "simulated with the server's own pool, page size and step budget. Made by",
                "`python experiments/real_servers/run.py` from the recorded runs.",
            ],
            "results.png",
            claims(found),
        ),
        "",
        "## Hits",
        "",
        "Cached prompt tokens. *In its order*: requests replayed in the order in which the server admitted them; how many find",
        "other cached tokens than the server said, run by run. *Real to real*: how many requests differ between two runs of the",
        "server, and the spread of their hit rates. *Preemptions*: of the server, run by run; in its order, requests are",
        "preempted as there. Of a request that is preempted before its first token, vLLM 0.25 tells what it finds at its last",
        "admission, its own blocks among them: 16,336 tokens of one request of conversations in the first run with the 0.7x",
        "pool, and none in the other two. So a simulation is 0.3 points off their mean, or 0.7, by whether it has that.",
        "",
        "With memory on the host, the same five requests differ in all three runs: vLLM 0.25.1 makes the host's blocks recent",
        "whenever a request looks them up, and 0.33, whose order is simulated, when a request finishes.",
        "",
        *markdown(
            (
                "pool",
                "workload",
                "requests",
                "server",
                "in its order: differ",
                "simulated",
                "points",
                "real to real",
                "preemptions",
            ),
            [hit_row(one) for one in found],
        ),
        "",
        "## Hits by tier",
        "",
        *markdown(
            ("pool", "workload", "tier", "server, tokens", "simulated", "error"),
            [row for one in found for row in tier_rows(one)],
        ),
        "",
        "## Times",
        "",
        *TIMES_TEXT.splitlines(),
        "",
        *markdown(("pool", "workload", *TIMES.values(), "requests/s"), [time_row(one) for one in found]),
        "",
        "## SGLang",
        "",
        *SGLANG_TEXT.splitlines(),
    ]


def hit_row(one: Compared) -> tuple[str, ...]:
    record = one.record
    given, simulated = record["given_order"], record["simulated_order"]
    rate, between = simulated["hit_rate"], given["between_real"]
    return (
        one.label,
        one.workload,
        f"{record['compared']:,}",
        f"{rate['means'][1]:.2%}",
        ", ".join(map(str, given["differing"])),
        f"{rate['means'][0]:.2%}",
        f"{points_of(rate):+.2f}",
        "one run" if between is None else f"{between:.1f} requests, {100 * rate['spread']:.2f} points",
        ", ".join(str(run["preemptions"]) for run in record["runs"]),
    )


def tier_rows(one: Compared) -> Iterator[tuple[str, ...]]:
    for medium, pair in one.record["media"].items():
        if any(pair["means"]):
            yield (
                one.label,
                one.workload,
                medium,
                f"{pair['means'][1]:,.0f}",
                f"{pair['means'][0]:,.0f}",
                f"{pair['error']:+.1%}",
            )


def time_row(one: Compared) -> tuple[str, ...]:
    times = one.record["times"]
    cells = [f"{times[name]['error']:+.1%} ({spread(times[name])})" for name in (*TIMES, "requests_per_s")]
    return one.label, one.workload, *cells


def spread(pair: dict[str, Any]) -> str:
    value = pair.get("relative_spread")
    return "one run" if value is None else f"{value:.1%}"


def picture(found: Sequence[Compared]) -> go.Figure:
    """Each request's TTFT, simulated against real."""
    figure = go.Figure()
    for one in found:
        simulated, real = ([1000 * x for x in series] for series in one.record["requests_ttft_s"][:2])
        label = f"{one.label}, {one.workload}"
        figure.add_scatter(x=real, y=simulated, mode="markers", name=label, marker={"size": 5})
    figure.add_scatter(x=[20, 30_000], y=[20, 30_000], mode="lines", name="equal", line={"color": "grey", "width": 1})
    figure.update_xaxes(type="log", title="TTFT of the server, ms")
    figure.update_yaxes(type="log", title="TTFT simulated, ms")
    figure.update_layout(template="plotly_white", width=900, height=560, margin={"l": 70, "r": 20, "t": 20, "b": 60})
    return figure


def main() -> int:
    parser = option_parser(__file__, __doc__, {"conversation": CONVERSATION})
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        chosen = folder / "conversations.jsonl"
        chosen.write_text("".join(json.dumps(row) + "\n" for row in conversations(read_rows(Path(options.conversation)))))
        traces = {one.name: one.settings for one in workloads(chosen)}
        found = [compare(group, traces, folder) for group in groups()]
    print(write_page(options.output, page(found)))
    write_figure(options.output, picture(found))
    return int(not all(claim.holds for claim in claims(found)))


if __name__ == "__main__":
    sys.exit(main())
