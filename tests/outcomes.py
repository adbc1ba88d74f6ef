"""Small outcomes, as fixtures; every number in them can be checked by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvsim.core.request import Request
from kvsim.engine.columns import recorded
from kvsim.engine.link_use import LinkUse
from kvsim.engine.outcome import FINISHED, REJECTED, EngineUse, Outcome, TierUse


def make_outcome(
    prompts: Sequence[int],
    hit_pages: Sequence[tuple[int, int, int]],
    *,
    page_tokens: int = 10,
    rejected: Sequence[int] = (),
    ttft_s: Sequence[float] | None = None,
    arrival_s: Sequence[float] | None = None,
    links: dict[str, LinkUse] | None = None,
) -> Outcome:
    """One request for each prompt length, its trailing partial page included; answers are 5 tokens at 0.5 s a token.

    Without ``ttft_s`` the run has no clock; with it, request i arrives at second i unless ``arrival_s`` says otherwise.
    There is a disk tier if there are hits on it.
    """
    n = len(prompts)
    pages = np.array(hit_pages, np.int64).reshape(n, 3)
    disk = {"disk": TierUse(capacity_pages=20, peak_pages=8, evicted_pages=0, inserted_pages=8)} if pages[:, 2].any() else {}
    requests = [_request(index, tokens, page_tokens) for index, tokens in enumerate(prompts)]
    known: dict[str, Any] = {"hit_pages": pages, "status": [REJECTED if index in rejected else FINISHED for index in range(n)]}
    if ttft_s is not None:
        ttft = np.array(ttft_s, float)
        known |= {"arrival_s": range(n) if arrival_s is None else arrival_s, "ttft_s": ttft}
        known |= {"tpot_s": np.where(np.isnan(ttft), np.nan, 0.5), "e2e_s": ttft + 4 * 0.5}
    return Outcome(
        requests=requests,
        page_tokens=page_tokens,
        columns=recorded(requests, 3, known),
        tiers={
            "gpu": TierUse(capacity_pages=4, peak_pages=4, evicted_pages=7, inserted_pages=11),
            "cpu": TierUse(capacity_pages=None, peak_pages=9, evicted_pages=0, inserted_pages=9),
            **disk,
        },
        links=links or {},
        prefetch={},
        placement={},
        checkpoints={},
        simulated_s=0.0 if ttft_s is None else 10.0,
        wall_s=2.0,
    )


def _request(index: int, tokens: int, page_tokens: int) -> Request:
    pages = -(-tokens // page_tokens)
    return Request(
        index=index,
        arrival_s=float(index),
        prompt_tokens=tokens,
        output_tokens=5,
        runs=((100 * index, pages),),
        prompt_pages=pages,
    )


@pytest.fixture
def outcome_of() -> Callable[..., Outcome]:
    """``make_outcome``, for outcomes of a test's own."""
    return make_outcome


@pytest.fixture
def replayed() -> Outcome:
    """Four requests without a clock; the second hits a partial page, the third is rejected.

    | request | prompt tokens, pages | hit pages gpu, cpu, disk | hit tokens |
    |---|---|---|---|
    | 0 | 40, 4 | 0, 0, 0 | 0, 0, 0 |
    | 1 | 35, 4 | 2, 2, 0 | 20, 15, 0 |
    | 2 | 90, 9 | rejected | |
    | 3 | 60, 6 | 1, 0, 3 | 10, 0, 30 |
    """
    return make_outcome([40, 35, 90, 60], [(0, 0, 0), (2, 2, 0), (0, 0, 0), (1, 0, 3)], rejected=[2])


@pytest.fixture
def simulated() -> Outcome:
    """Four requests, one a second, over a link that is busy from 0 s to 2 s and from 5 s to 6 s; the last is rejected."""
    link = LinkUse(bytes=3_000_000_000, transfers=2, busy_s=3.0, intervals=np.array([[0.0, 2.0, 2e9], [5.0, 6.0, 1e9]]))
    return make_outcome(
        [40, 40, 40, 40],
        [(0, 0, 0), (2, 0, 0), (1, 1, 0), (0, 0, 0)],
        rejected=[3],
        ttft_s=[1.0, 2.0, 6.0, np.nan],
        links={"cpu_to_gpu": link},
    )


def engine_use(engine: int, *, role: str = "both", busy_s: float = 4.0, waited_s: float = 0.0, host: int = 0) -> EngineUse:
    """An engine with a GPU tier of 4 pages, all of them used."""
    return EngineUse(
        engine=engine, host=host, role=role, capacity_pages=4, peak_pages=4, evicted_pages=1, inserted_pages=5, busy_s=busy_s,
        waited_s=waited_s, most_queued=2, retractions=0, failures=0,
    )  # fmt: skip


@pytest.fixture
def clustered(simulated: Outcome) -> Outcome:
    """The four requests of ``simulated`` on two engines: 0 and 2 on the first one, which is busy three times as long.

    | request | engine | arrival, first token, end (s) | prompt, hit tokens |
    |---|---|---|---|
    | 0 | 0 | 0, 1, 3 | 40, 0 |
    | 1 | 1 | 1, 3, 5 | 40, 20 |
    | 2 | 0 | 2, 8, 10 | 40, 20 |
    | 3 | rejected | | |
    """
    link = simulated.links["cpu_to_gpu"]
    simulated.links = {"cpu-gpu": link}
    link.name = "cpu-gpu"
    simulated.link_lanes = [link]
    simulated.columns["engine"] = simulated.columns["decoder"] = np.array([0, 1, 0, -1])
    simulated.engines = [engine_use(0, busy_s=6.0, waited_s=5.0), engine_use(1, busy_s=2.0)]
    return simulated


@pytest.fixture
def handed_over(clustered: Outcome) -> Outcome:
    """The same requests where engine 0 computes all prompts but that of request 1, and engines 2 and 3 decode."""
    clustered.columns["decoder"] = np.array([2, 2, 3, -1])
    clustered.engines = [
        engine_use(0, role="prefill", busy_s=6.0),
        engine_use(1, role="prefill", busy_s=2.0),
        engine_use(2, role="decode", busy_s=1.0, host=1),
        engine_use(3, role="decode", busy_s=1.0, host=1),
    ]
    sent = {"name": "gpu-gpu", "transfers": 1, "busy_s": 1.0}
    clustered.link_lanes = [
        *clustered.link_lanes,
        LinkUse(owner=0, receiver=2, bytes=100, **sent),
        LinkUse(owner=0, receiver=3, bytes=300, **sent),
        LinkUse(owner=1, receiver=2, bytes=10, **sent),
    ]
    return clustered
