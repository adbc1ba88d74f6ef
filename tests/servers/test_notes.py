"""What a run says of itself when a server did otherwise than asked."""

from kvsim.core.request import Request
from kvsim.results.observed import NOT_TOLD, ObservedRun, ServerFacts
from kvsim.servers.answer import Answer
from kvsim.servers.dialects.base import Dialect, Known
from kvsim.servers.dialects.openai import OpenAI
from kvsim.servers.dialects.sglang import Sglang
from kvsim.servers.dialects.vllm import Vllm
from kvsim.servers.play import Played
from kvsim.servers.prompts import PromptTokens
from kvsim.servers.settings import ServerSettings
from tests.workloads import make_request

SETTINGS = ServerSettings(url="http://localhost:8000")


def run_of(
    answers: list[Answer], dialect: Dialect, *, page_tokens: int = 4, engines: int = 1, token_ids: int = 50
) -> ObservedRun:
    """The run of prompts of 8 tokens, and answers of 3, with these answers."""
    requests: list[Request] = [
        make_request([2 * n, 2 * n + 1], index=n, prompt_tokens=8, output_tokens=3) for n in range(len(answers))
    ]
    known = Known(ServerFacts(engine=dialect.engine, page_tokens=page_tokens), engines=engines)
    played = Played(requests, answers, known, dialect, PromptTokens(requests, 4, 1000, token_ids), 0.0)
    return played.run(SETTINGS, {}, [])


def answer(**about: object) -> Answer:
    given = {"output_tokens": 3, "cached_tokens": 4, "due_s": 0.0, "sent_s": 0.0, "end_s": 1.0, "chunk_times_s": [0.5, 1.0]}
    return Answer(8, **(given | about))  # type: ignore[arg-type]


def test_a_run_as_asked_needs_no_note() -> None:
    run = run_of([answer(), answer()], Vllm())
    assert run.notes == [] and not run.is_client_bound and run.cached_tokens.tolist() == [4, 4]


def test_other_lengths_are_noted() -> None:
    short = answer(output_tokens=2)
    longer = answer()
    longer.prompt_tokens = 9
    failed = answer(output_tokens=1, error="HTTP 500: broken")
    assert run_of([short, longer, failed], Vllm()).notes == [
        "the server counts other tokens than 1 prompts were sent with: does it add special tokens?",
        "1 answers are not as long as asked",
    ]


def test_a_first_token_that_prompts_share_matters_to_pages_of_one_token() -> None:
    answers = [answer() for _ in range(4)]
    assert run_of(answers, Sglang(), page_tokens=1, token_ids=2).notes == [
        "2 pages may seem to be cached for one token more: set token_ids to more than that"
    ]
    assert run_of(answers, Sglang(), page_tokens=4, token_ids=2).notes == []


def test_several_engines_are_noted() -> None:
    (note,) = run_of([answer()], Sglang(), engines=2).notes
    assert note.startswith("the server has 2 engines with a cache each")


def test_what_vllm_leaves_out_is_nothing_if_it_tells_of_others() -> None:
    """Older versions say nothing of a prompt of which nothing was cached."""
    told, untold = answer(), answer(cached_tokens=NOT_TOLD)
    assert run_of([told, untold], Vllm()).cached_tokens.tolist() == [4, 0]
    assert run_of([told, answer(cached_tokens=NOT_TOLD)], OpenAI()).cached_tokens.tolist() == [4, NOT_TOLD]
    never = run_of([answer(cached_tokens=NOT_TOLD)], Vllm())
    assert never.cached_tokens.tolist() == [NOT_TOLD] and "--enable-prompt-tokens-details" in never.notes[0]


def test_a_tier_that_is_not_told_is_none_where_nothing_was_cached() -> None:
    first = answer(tier_tokens={"device": 1, "host": 3})
    run = run_of([first, answer(cached_tokens=0), answer()], Sglang())
    assert run.tier_tokens["device"].tolist() == [1, 0, NOT_TOLD] and run.tier_tokens["host"].tolist() == [3, 0, NOT_TOLD]
