"""The decisions of prefetch=tool_calls, by hand and beside a slow model: a page takes 1 s on the link, either way."""

from math import ceil, inf, isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.core.request import Request
from kvsim.hardware.spec import HardwareSpec
from kvsim.policies.context import PolicyContext
from kvsim.policies.prefetch.base import ToolCall, Upload
from kvsim.policies.prefetch.tool_calls import ToolCallPrefetch
from tests.engine.small import HARDWARE, MODEL, PAGE_TOKENS, ask, hits, seconds, small_engine
from tests.workloads import make_request

HALF_AS_FAST_DOWN = HARDWARE | {"device_to_host_bytes_per_s": HARDWARE["device_to_host_bytes_per_s"] / 2}


def bound(**settings: Any) -> ToolCallPrefetch:
    """The policy on a machine that loads a page in 1 s and writes one in 2 s."""
    policy = ToolCallPrefetch(**settings)
    machine = HardwareSpec(**HALF_AS_FAST_DOWN)
    policy.bind(PolicyContext(tier=1, tier_name="cpu", page_tokens=PAGE_TOKENS, model=MODEL, hardware=machine))
    return policy


def asked(kind: str = "") -> Request:
    request = make_request(range(8), prompt_tokens=33)
    request.kind = kind
    return request


def call(
    *, kind: str = "", path: int = 8, idle: int = 6, unwritten: int = 2, free: int = 0, waiting: int = 1, lasts: float = nan
) -> ToolCall:
    return ToolCall(
        request=asked(kind), path_pages=path, idle_pages=idle, unwritten_pages=unwritten, free_pages=free, waiting_pages=waiting,
        duration_s=lasts,
    )  # fmt: skip


def times(upload: Upload | None) -> tuple[float, float] | None:
    return None if upload is None else (upload.begin_s, upload.until_s)


def test_nothing_is_done_before_a_call_of_that_kind_has_ended() -> None:
    policy = bound()
    policy.on_call_end(asked("agent"), 100.0)
    assert not policy.offload(call(kind="subagent")) and policy.upload(call(kind="subagent")) is None
    assert policy.offload(call(kind="agent")) and policy.upload(call(kind="agent")) is not None


def test_a_call_must_last_longer_than_its_transfers() -> None:
    """Writing 2 pages takes 4 s, loading 6 pages 6 s. With a margin of 2, that is 20 s."""
    for margin, enough_s in ((1.0, 10.0), (2.0, 20.0)):
        policy = bound(margin=margin, foresight=True)
        assert not policy.offload(call(lasts=enough_s))
        assert policy.offload(call(lasts=enough_s + 0.001))
    assert bound(foresight=True).offload(call(unwritten=0, lasts=6.001)), "nothing has to be written"


def test_pages_leave_only_for_requests_that_need_more_than_is_free() -> None:
    policy = bound(foresight=True)
    assert not policy.offload(call(waiting=0, lasts=100.0))
    assert not policy.offload(call(waiting=5, free=5, lasts=100.0))
    assert policy.offload(call(waiting=6, free=5, lasts=100.0))
    assert bound(foresight=True, only_for_waiting=False).offload(call(waiting=0, lasts=100.0))


def test_the_whole_path_is_back_when_the_call_is_expected_to_end() -> None:
    """8 pages take 8 s."""
    assert times(bound(foresight=True).upload(call(lasts=30.0))) == (22.0, 32.0)
    assert times(bound(foresight=True, lead_s=1.5, keep_s=7.0).upload(call(lasts=30.0))) == (20.5, 37.0)
    assert times(bound(foresight=True).upload(call(lasts=3.0))) == (0.0, 5.0), "at once, if there is too little time"
    assert bound(foresight=True, uploads=False).upload(call(lasts=30.0)) is None
    only_up = bound(foresight=True, offloads=False)
    assert not only_up.offload(call(lasts=1e6)) and times(only_up.upload(call(lasts=30.0))) == (22.0, 32.0)


def test_without_foresight_the_true_duration_is_not_asked_for() -> None:
    assert bound(foresight=True).needs_future and not bound().needs_future


def test_a_call_whose_duration_depends_on_others_is_predicted_even_with_foresight() -> None:
    policy = bound(foresight=True)
    assert isnan(policy.predicted_s(call()))
    policy.on_call_end(asked(), 12.0)
    assert policy.predicted_s(call()) == 12.0 and policy.predicted_s(call(lasts=3.0)) == 3.0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, 2.5, 7.0, 7.0, 40.0])), max_size=30),
    st.integers(1, 6),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)
def test_a_slow_model_decides_the_same(
    ended: list[tuple[str, float]], window: int, quantile: float, pages: tuple[int, int, int, int]
) -> None:
    policy = bound(window_calls=window, quantile=quantile, lead_s=0.5, keep_s=3.0)
    idle, unwritten, free, waiting = pages[0], min(pages[:2]), *pages[2:]
    for number in range(len(ended) + 1):
        if number:
            policy.on_call_end(asked(ended[number - 1][0]), ended[number - 1][1])
        for kind in "ab":
            latest = [lasted for other, lasted in ended[:number] if other == kind][-window:]
            enough = [lasted for lasted in sorted(latest) if sum(other <= lasted for other in latest) >= quantile * len(latest)]
            asks = call(kind=kind, idle=idle, unwritten=unwritten, free=free, waiting=waiting)
            leaves = bool(enough) and enough[0] > 2 * unwritten + idle and waiting > free
            assert policy.offload(asks) == leaves
            back = (max(0.0, enough[0] - 0.5 - 8), enough[0] + 3.0) if enough else None
            assert times(policy.upload(asks)) == (None if back is None else pytest.approx(back))


def test_a_session_of_equal_pauses_is_loaded_ahead_from_its_second_call_on() -> None:
    """Each turn adds a page; calls last 20 s. The first one is unknown: its pages stay. Before the second one's end, 5 pages come
    back from 20 - 5 s on, and before the third one's, 6."""
    policy = ToolCallPrefetch(only_for_waiting=False)
    small = small_engine(gpu=20, cpu=20, prefetch=policy, overlap="none")
    outcome = small.serve(ask("abcd"), *[ask("abcdefgh"[: 5 + turn], after=turn, delay_s=20.0) for turn in range(3)])
    assert [hits(outcome, turn) for turn in range(4)] == [(0, 0, 0), (4, 0, 0), (5, 0, 0), (6, 0, 0)]
    assert outcome.ttft_s.tolist() == seconds([17.0, 5.0, 5.0, 5.0])
    assert outcome.tool_calls["uploaded_pages"] == outcome.tool_calls["used_pages"] == 11
    assert outcome.tool_calls["offloaded_pages"] == 11


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": 0}, "margin must be above 0, not 0"),
        ({"quantile": 1.5}, "quantile must be above 0 and at most 1, not 1.5"),
        ({"window_calls": 0}, "window_calls must be at least 1, not 0"),
        ({"keep_s": -1}, "keep_s"),
        ({"lead_s": inf}, "lead_s"),
        ({"offloads": False, "uploads": False}, "offloads and uploads are both false, so that nothing moves during calls"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToolCallPrefetch(**settings)


def test_the_nearest_rank_is_taken() -> None:
    policy = bound(quantile=0.5)
    for lasted in (4.0, 1.0, 3.0, 2.0):
        policy.on_call_end(asked(), lasted)
    assert policy.predicted_s(call()) == sorted((4.0, 1.0, 3.0, 2.0))[ceil(0.5 * 4) - 1] == 2.0
