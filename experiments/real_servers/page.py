"""The page of the study: tables, text and picture."""

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import plotly.graph_objects as go
from comparing import NAMES, POOLS, TIMES, Compared, points_of
from steps import BATCHES, Steps

from kvsim.report.study import Claim, markdown, opening

ON_GPU = [POOLS[name] for name in ("0.7x", "1x", "1.4x")]

LEAST_STEPS = 20
"""Fewer are not in the table."""

HITS_TEXT = """\
Cached prompt tokens. *In its order*: requests replayed in the order in which the server admitted them; how many find
other cached tokens than the server said, run by run. *Real to real*: how many requests differ between two runs of the
server, and the spread of their hit rates. *Preemptions*: of the server, run by run, and of the simulation; in its order,
requests are preempted as there. Of a request that is preempted before its first token, vLLM 0.25 tells what it finds at
its last admission, its own blocks among them: 16,336 tokens of one request of conversations in the first run with the
0.7x pool, and none in the other two. So a simulation is 0.3 points off their mean, or 0.7, by whether it has that."""

HOSTED_TEXT = """\
With memory on the host, vLLM 0.25.1 gives the blocks of a preempted request back only when the step in flight has ended. So
without room for a request, one pass preempts it and all that were admitted after it, and the next pass admits nearly all of them
again: {counts} preemptions in these runs, {simulated} in the simulation. Which ones are left out hangs on milliseconds. They wait
for seconds, and the others, since they are looked up, make their chunks on the host recent. That decides what the simulated
requests lack that find other cached tokens ({differing}), and the p99 of TPOT, which is that of a request with a short answer."""

TIMES_TEXT = """\
Error of the simulation, and in brackets the spread of the server's own runs. The machine was measured hours apart from the runs,
perhaps on another H100. Near what the server can take, waiting multiplies errors of steps: there, 1% of a step is several percent
of the mean TTFT."""

CHOICES_TEXT = """\
Two choices were made after a look at these runs, though their numbers come from the calibration alone. Of context that decoding
requests share, a GPU reads only as much faster as its cache holds (`repeated_context_bytes`), not one share for all contexts. And
held-out batches count alike when they choose the model, not in multiples of their noise: these would choose the roofline."""

STEPS_TEXT = """\
By how much the machine's time is off for steps that compute nothing but decoding requests: the median, by the number of these,
and in brackets the number of steps, in the first run of each group. With fewer than {many}, the machine's time is {conversations}
off in conversations, whose requests share most of their contexts, and {sessions} in sessions. With memory on the host,
{share:.0%} of the decoding steps are in conversations with fewer than {many}."""

READMITTED_TEXT = """\
In the first run with {label}, {passes} passes preempted requests that came back with the next one, {count} in all. The two steps
after such a pass took {mean_ms:.0f} ms longer in the mean than two before it, {extra_s:.2f} s in all: to admit many requests
takes time of the server's processor, which the simulation does not have."""

SGLANG_TEXT = """\
What is claimed of SGLang was written down after a look at the first two runs with 1x; what is claimed of vLLM are figures that
other simulators have published. SGLang 0.5.15 played conversations with two pools. Its flags: Triton's attention, PyTorch's
sampling, pages of 16 tokens, chunks of 8,192, first come first served, the overlapping loop, no mixed chunks, LRU. With 0.7x, it
has retracted one request in each run: its answer pauses for 32 s, since it goes to the end of the queue.

**In its order.** SGLang takes requests into its queue only between steps, and says how long they were in the queue from then
on. Steps that compute nothing but a chunk of a long prompt send no token, so a client does not see them; they follow from how
many tokens each prompt was computed for, since only one prompt at a time is computed in several steps. By the server's log, each
step with prompts of the first run with 0.7x, and of the third one with 1x, has as many prompts, new tokens and cached ones as
kvsim's replay gives it. 0.5.15 differs from 0.5.23 (`rules.version`): without room for a step it evicts as much as that needs in
all, it does not look up waiting requests to keep their prompts, and a request decodes once more while its last token is computed.
With 1x, simulated evictions are 277,136 tokens, as the server's counter says.

**Simulated.** With 0.7x, four requests find other cached tokens. One is looked up after a prompt that the server, slower in its
first second, was still computing: 4,720 tokens more. One is admitted half a second earlier, and finds 13,312 tokens that the
server had evicted by then. One finds the 1,024 tokens that were lost with the retraction; the simulation retracts none, because
other requests run when memory is short. One finds 512 fewer.

**Times.** Triton's attention over cached context (`extend_attention.py`) starts as many blocks of queries for each prompt of
a step as the longest of them has, and none ends early: with a chunk of 648 tokens after 25,600 cached ones beside one of
4,712, a step of 8,176 tokens took 719 ms. By the sum of its parts that would be 250 ms, and padded so 638 ms (`pads_chunks`).
Without it, mean TTFTs were simulated 37% too short, and mean TPOTs 19%. It is known from the source, not fitted: no batch of
the calibration shows it. Against the server's log, full steps of one prompt are 16% too short to 8% too long, and steps of
fewer than 3,000 prompt tokens mostly 20 to 40% too short. What the machine does not have: to decode one request after 16,384
tokens takes 12.3 ms, and 29% less by the file, because Triton splits a context into 8 parts at most, while kvsim goes by the
tokens of all requests together. The batch held out that is 59% off, 64 decoding requests and a prompt of 432 tokens, could be
read in one of its two plays alone."""


def page(found: Sequence[Compared], claims: Sequence[Claim], taken: Sequence[Steps]) -> list[str]:
    """Return the page. ``taken`` has the steps of vLLM's groups."""
    servers = sorted({(one.record["server"]["engine"], one.record["server"]["version"]) for one in found}, reverse=True)
    names = " and ".join(f"{NAMES[engine]} {version}" for engine, version in servers)
    title = f"Against a running {' and a running '.join(dict.fromkeys(NAMES[engine] for engine, _ in servers))}"
    made = [
        f"{names} with shapes of Llama 3 8B and random weights on an H100, played by kvsim's client;",
        "simulated with the server's own pool, page size and step budget. Made by",
        "`python experiments/real_servers/run.py` from the recorded runs.",
    ]
    sections = (hits(found), tiers(found), times(found), steps(taken), ["## SGLang", "", *SGLANG_TEXT.splitlines()])
    return [*opening(title, made, "results.png", claims), *[line for section in sections for line in ("", *section)]]


def hits(found: Sequence[Compared]) -> list[str]:
    """Return the section on hits."""
    names = "pool", "workload", "requests", "server", "in its order: differ", "simulated", "points", "real to real"
    rows = [hit_row(one) for one in found]
    return [
        "## Hits",
        "",
        *HITS_TEXT.splitlines(),
        "",
        *hosted_text([one for one in found if one.engine == "vllm" and one.pool == "offload"]),
        "",
        *markdown((*names, "preemptions", "simulated"), rows),
    ]


def hosted_text(found: Sequence[Compared]) -> list[str]:
    """Return what is to be said of vLLM's runs with memory on the host."""
    differing = ", ".join(str(one.record["simulated_order"]["differing"]) for one in found)
    counts = ", ".join(count for one in found for count in told(one))
    simulated = ", ".join(str(one.preemptions) for one in found)
    return wrap(HOSTED_TEXT.format(counts=counts, simulated=simulated, differing=differing))


def wrap(paragraph: str) -> list[str]:
    """Return the lines of a paragraph."""
    return textwrap.wrap(paragraph, 120, break_on_hyphens=False)


def told(one: Compared) -> list[str]:
    return [str(run["preemptions"]) for run in one.record["runs"]]


def tiers(found: Sequence[Compared]) -> list[str]:
    """Return the section on hits by tier."""
    names = "pool", "workload", "tier", "server, tokens", "simulated", "error"
    return ["## Hits by tier", "", *markdown(names, [row for one in found for row in tier_rows(one)])]


def times(found: Sequence[Compared]) -> list[str]:
    """Return the section on times."""
    return [
        "## Times",
        "",
        *wrap(TIMES_TEXT),
        "",
        *wrap(CHOICES_TEXT),
        "",
        *markdown(("pool", "workload", *TIMES.values(), "requests/s"), [time_row(one) for one in found]),
    ]


def steps(taken: Sequence[Steps]) -> list[str]:
    """Return the section on steps of vLLM."""
    names = [f"{least} to {most}" for least, most in BATCHES[:-1]] + [f"{BATCHES[-1][0]} or more"]
    return [
        "## Decoding steps",
        "",
        *wrap(
            STEPS_TEXT.format(
                many=BATCHES[-1][0],
                conversations=off_with_few(taken, "conversations"),
                sessions=off_with_few(taken, "sessions"),
                share=share_of_few(taken),
            )
        ),
        "",
        *markdown(("pool", "workload", *names), [step_row(one) for one in taken]),
        *[line for one in taken if one.readmissions and one.label not in ON_GPU for line in ("", *readmitted(one))],
    ]


def share_of_few(taken: Sequence[Steps]) -> float:
    """Return the share of the decoding steps with memory on the host that have fewer requests than those of the last column."""
    numbers = [step.requests for one in taken if one.label not in ON_GPU for step in one.decoding]
    return sum(number < BATCHES[-1][0] for number in numbers) / max(len(numbers), 1)


def off_with_few(taken: Sequence[Steps], workload: str) -> str:
    """Return between what the errors of all columns but the last one are, in the groups of a workload."""
    found = [off(one, *few) for one in taken if one.workload == workload for few in BATCHES[:-1]]
    known = [error for error, _ in found if error is not None]
    return f"{min(known):+.0%} to {max(known):+.0%}" if known else "not known to be"


def off(one: Steps, least: int, most: int) -> tuple[float | None, int]:
    """Return the median error of steps with so many requests, None if there are too few of these, and the number of these."""
    some = [step.machine_s / step.seconds - 1 for step in one.decoding if least <= step.requests <= most]
    return (median(some) if len(some) >= LEAST_STEPS else None), len(some)


def step_row(one: Steps) -> tuple[str, ...]:
    found = [off(one, *numbers) for numbers in BATCHES]
    return one.label, one.workload, *("" if error is None else f"{error:+.1%} ({count:,})" for error, count in found)


def readmitted(one: Steps) -> list[str]:
    """Return what passes cost that preempt several requests."""
    passes, count = len(one.readmissions), sum(number for number, _ in one.readmissions)
    extra_s = sum(seconds for _, seconds in one.readmissions)
    mean_ms = 1000 * extra_s / passes
    return wrap(READMITTED_TEXT.format(label=one.label, passes=passes, count=count, mean_ms=mean_ms, extra_s=extra_s))


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
        ", ".join(told(one)),
        f"{one.preemptions}",
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
