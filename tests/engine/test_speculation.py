"""Speculative decoding: what a step yields, how long it takes, and which pages it needs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.__main__ import main
from kvsim.core.request import Request
from kvsim.engine.engine import EngineSettings
from kvsim.engine.speculation import Answers, Speculation
from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.compute import Roofline
from kvsim.substrate.simulated.drafted_steps import DraftedSteps
from tests.engine.drawn import SETTINGS, asks
from tests.engine.small import FOREVER, HARDWARE, MODEL, STEP_READS, ask, check_idle, make_requests, seconds, small_engine

RIGHT, WRONG = Speculation(tokens=2, acceptance=[1.0]), Speculation(tokens=2, acceptance=[0.0])


def request(index: int, output: int) -> Request:
    return Request(index=index, arrival_s=0.0, prompt_tokens=4, output_tokens=output, runs=(), prompt_pages=1)


def lengths(settings: Speculation, one: Request) -> list[int]:
    """What each step of an answer yields."""
    answers, generated, found = Answers(settings), 1, []
    while generated < one.output_tokens:
        found.append(answers.step(one, generated))
        generated += found[-1]
    return found


@pytest.mark.parametrize(
    ("settings", "output", "expected"),
    [
        (RIGHT, 8, [3, 3, 1]),
        (RIGHT, 7, [3, 3]),
        (RIGHT, 3, [2]),
        (WRONG, 4, [1, 1, 1]),
        (Speculation(tokens=3, acceptance=[1.0, 0.0]), 6, [2, 2, 1]),
        (Speculation(tokens=3, acceptance=[1.0, 1.0, 0.0]), 8, [3, 3, 1]),
        (Speculation(), 3, [1, 1]),
    ],
)
def test_steps_go_as_far_as_the_draft_is_right(settings: Speculation, output: int, expected: list[int]) -> None:
    assert lengths(settings, request(0, output)) == expected


def slow_mean(chances: list[float], tokens: int) -> float:
    """The mean yield of a step, as a sum over how many draft tokens are right."""
    place = [chances[min(at, len(chances) - 1)] for at in range(tokens)]
    ends = [float(np.prod(place[:right])) * (1 - place[right]) for right in range(tokens)]
    return sum((right + 1) * end for right, end in enumerate(ends)) + (tokens + 1) * float(np.prod(place))


@pytest.mark.parametrize(("tokens", "chances"), [(4, [0.8]), (3, [0.9, 0.5, 0.3]), (7, [0.6])])
def test_the_mean_yield_is_that_of_the_paper(tokens: int, chances: list[float]) -> None:
    settings = Speculation(tokens=tokens, acceptance=chances)
    assert settings.expected_tokens() == pytest.approx(slow_mean(chances, tokens))
    if len(chances) == 1:
        assert settings.expected_tokens() == pytest.approx((1 - chances[0] ** (tokens + 1)) / (1 - chances[0]))
    yields = [one for index in range(40) for one in lengths(settings, request(index, 2_000))]
    error = np.std(yields) / len(yields) ** 0.5
    assert abs(np.mean(yields) - settings.expected_tokens()) < 4 * error


def test_answers_have_draws_of_their_own_and_the_same_each_time() -> None:
    settings = Speculation(tokens=3, acceptance=[0.5])
    assert lengths(settings, request(1, 90)) == lengths(settings, request(1, 90)) != lengths(settings, request(2, 90))
    assert lengths(settings, request(1, 90)) != lengths(Speculation(tokens=3, acceptance=[0.5], seed=1), request(1, 90))


def test_times_follow_the_steps() -> None:
    """Each step takes 1 s: a prompt, then steps of 3, 3 and 1 tokens."""
    outcome = small_engine(gpu=9, hardware=STEP_READS, speculation=RIGHT).serve(ask("a", output=8))
    assert (outcome.ttft_s[0], outcome.e2e_s[0], outcome.tpot_s[0]) == (seconds(1), seconds(4), seconds(3 / 7))
    assert outcome.drafts == {"steps": 3, "draft_tokens": 6, "accepted_tokens": 5, "tokens": 7}


def test_a_step_computes_the_draft_of_each_request() -> None:
    """A token takes 1 s: five of a prompt, then two steps of three tokens each; a second request prefills beside the first."""
    outcome = small_engine(gpu=9, speculation=RIGHT).serve(ask("a", output=7))
    assert (outcome.ttft_s[0], outcome.e2e_s[0]) == (seconds(5), seconds(11))
    outcome = small_engine(gpu=9, speculation=RIGHT, max_batch_tokens=5, max_running_requests=1).serve(
        ask("a", output=4), ask("b", output=4)
    )
    assert outcome.e2e_s.tolist() == seconds([8, 16])


def test_drafts_count_towards_the_tokens_of_a_step() -> None:
    """Five tokens fit: beside three of the first request, two of the prompt of the second one, which takes three steps."""
    engine = small_engine(gpu=9, hardware=STEP_READS, speculation=RIGHT, max_batch_tokens=6, max_running_requests=2)
    outcome = engine.serve(ask("a", output=16), ask("b", at=0.5))
    assert outcome.ttft_s.tolist() == seconds([1, 2.5])


def test_wrong_drafts_change_no_time_where_tokens_are_free() -> None:
    some = [ask("ab", output=9), ask("abc", at=2.0, output=5), ask("b", at=3.5, tokens=3, output=12)]
    plain = small_engine(gpu=20, hardware=STEP_READS).serve(*some)
    drafted = small_engine(gpu=20, hardware=STEP_READS, speculation=WRONG).serve(*some)
    for name in ("ttft_s", "e2e_s", "tpot_s"):
        np.testing.assert_allclose(getattr(drafted, name), getattr(plain, name), rtol=1e-9)
    assert (drafted.hit_pages == plain.hit_pages).all()


def test_a_step_needs_pages_for_its_draft() -> None:
    """Eight tokens of a prompt fill two pages; the first step needs a third one for three tokens, and so do the next ones."""
    engine = small_engine(gpu=4, hardware=STEP_READS, speculation=WRONG)
    outcome = engine.serve(ask("a", tokens=4, output=6))
    assert outcome.tiers["gpu"].peak_pages == 4  # 8 + 5 tokens in all: drafts beyond the answer take no pages
    assert outcome.e2e_s[0] == seconds(6)


def test_the_steps_of_an_answer_do_not_depend_on_the_batch() -> None:
    settings = Speculation(tokens=3, acceptance=[0.7])
    some = [ask("abc"[at % 3], at=0.3 * at, tokens=1 + at, output=20) for at in range(6)]
    found = [
        small_engine(gpu=gpu, speculation=settings, max_running_requests=most).serve(*some).drafts
        for gpu, most in ((200, 1), (200, 6))
    ]
    assert found[0] == found[1] and found[0]["tokens"] == 6 * 19


@SETTINGS
@given(asks(), st.integers(1, 5), st.lists(st.sampled_from([0.0, 0.4, 0.9, 1.0]), min_size=1, max_size=3), st.integers(6, 14))
def test_any_requests_end_and_leave_nothing(some: Any, tokens: int, chances: list[float], gpu: int) -> None:
    """Also where memory is short, and requests are retracted: each answer is complete once."""
    settings = Speculation(tokens=tokens, acceptance=chances)
    engine = small_engine(gpu=gpu, cpu=6, speculation=settings, max_running_requests=4, cache_output=False)
    outcome = engine.run(make_requests(some))
    check_idle(engine)
    served = [one for one in outcome.requests if not outcome.status[one.index]]
    assert outcome.drafts["tokens"] + outcome.retractions >= sum(max(0, one.output_tokens - 1) for one in served)
    if not outcome.retractions:
        assert outcome.drafts["tokens"] == sum(max(0, one.output_tokens - 1) for one in served)
    assert outcome.drafts["accepted_tokens"] <= outcome.drafts["tokens"]


def test_the_roofline_counts_each_token_and_reads_the_context_once() -> None:
    plain = {"decode_requests": 3, "decode_context_tokens": 3_000}
    flops, n_bytes = Roofline(MODEL, HardwareSpec(**HARDWARE)).first_step(Work(**plain))
    more_flops, more_bytes = Roofline(MODEL, HardwareSpec(**HARDWARE)).first_step(Work(**plain, tokens_per_decode=5))
    linear = 3 * (MODEL.linear_flops_per_token + MODEL.sampling_flops_per_token)
    pairs = MODEL.decode_attention_flops_per_pair
    assert flops == pytest.approx(linear + pairs * 3_000)
    assert more_flops == pytest.approx(5 * linear + pairs * sum(1_000 + at for at in range(5)) * 3)
    assert more_bytes - n_bytes == pytest.approx(12 * MODEL.kv_bytes_per_token)


def test_a_draft_takes_its_share_for_each_token() -> None:
    machine = HardwareSpec(**(HARDWARE | {"flops_per_s": FOREVER, "memory_bytes_per_s": MODEL.weight_bytes(1)}))
    steps = DraftedSteps(Roofline(MODEL, machine), Speculation(tokens=4, draft_cost=0.1))
    assert steps.leap_s(Work(decode_requests=2, decode_context_tokens=8, tokens_per_decode=5), 1) == seconds(1.4)
    assert steps.leap_s(Work(chunks=[(5, 0)]), 1) == seconds(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": -1}, "tokens must be"),
        ({"acceptance": []}, "acceptance must have at least one probability"),
        ({"acceptance": [0.5, 1.5]}, "acceptance"),
        ({"draft_cost": -0.1}, "draft_cost must be"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Speculation(**settings)


def test_a_step_must_have_room_for_all_drafts() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens=100 has no room for speculation\.tokens=4.*at least 160"):
        EngineSettings(max_batch_tokens=100, max_running_requests=32, speculation=Speculation(tokens=4))


FEW = ("simulate", "trace.sessions=4", "trace.limit=20")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.speculation.acceptance=[0.5]"], "engine.speculation.acceptance has no effect without a draft"),
        (
            ["engine.speculation.tokens=2", "model=marconi_7b", "checkpoint=last"],
            "drafts are not simulated with recurrent layers",
        ),
        (["engine.speculation.tokens=2", "hardware.gpus=2", "hardware.pipeline_parallel=2"], "several stages"),
        (["engine.speculation.tokens=2", "rules=sglang"], "the schedule of SGLang's own rules"),
        (["engine.speculation.tokens=2", "substrate=hardware", "model=tiny"], "substrate=hardware, whose model has no draft"),
        (["engine.speculation.tokens=2", "rules=vllm_window", "model=gemma3_27b"], "the sliding windows of vLLM's rules"),
        (["engine.speculation.tokens=two"], "engine.speculation.tokens"),
        (["engine.speculation.token=2"], "engine.speculation.token"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FEW, *overrides, f"output={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_windows_that_the_rules_do_not_use_are_no_obstacle(tmp_path: Path) -> None:
    words = ["engine.speculation.tokens=2", "rules=lightllm", "model=gemma3_27b", "hardware.gpus=2"]
    assert main([*FEW, *words, f"output={tmp_path / 'out'}"]) == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["speculation"]["steps"] > 0


def test_results_tell_what_drafts_have_come_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for number, more in enumerate(([], ["engine.speculation.draft_cost=0.2"], ["engine.speculation.tokens=0"])):
        folder = tmp_path / str(number)
        words = ["engine.speculation.tokens=3", "engine.speculation.acceptance=[0.9,0.7]", *more]
        assert main([*FEW, *words, f"output={folder}"]) == (2 if "tokens=0" in "".join(more) else 0)
        if number < 2:
            found.append(json.loads((folder / "result.json").read_text()))
    counts = found[0]["speculation"]
    assert counts == found[1]["speculation"]
    assert counts["acceptance_rate"] == counts["accepted_tokens"] / counts["draft_tokens"]
    assert counts["tokens_per_step"] == counts["tokens"] / counts["steps"] > 2
    assert found[0]["tpot_s"]["mean"] < found[1]["tpot_s"]["mean"]
    told = f"{counts['tokens_per_step']:.2f} tokens of an answer a step; {100 * counts['acceptance_rate']:.2f}% of "
    shown = " ".join(capsys.readouterr().out.split())
    assert told in shown and told in (tmp_path / "0" / "report.html").read_text()
