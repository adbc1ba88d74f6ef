"""Live requests for tests, from tokens and from the requests of a trace."""

from collections.abc import Iterable, Sequence

from kvsim.core.request import Request
from kvsim.shadow.live import ChainKeys, LiveRequest
from tests.workloads import pages_of

KEYS = ChainKeys(b"test")


def keys_of(tokens: Sequence[int], page_tokens: int) -> tuple[bytes, ...]:
    """The keys of the whole pages of tokens."""
    return KEYS.of_prompt(tokens, page_tokens)


def from_tokens(prompt: Sequence[int], answer: Sequence[int] = (), *, page_tokens: int, at_s: float = 0.0) -> LiveRequest:
    """The request that a proxy sees: a prompt, and an answer whose last token has no KV."""
    keys = keys_of([*prompt, *answer[:-1]], page_tokens)
    whole = len(prompt) // page_tokens
    return LiveRequest(
        arrival_s=at_s,
        keys=keys[:whole],
        prompt_tokens=len(prompt),
        output_keys=keys[whole:],
        output_tokens=len(answer),
    )


def from_requests(requests: Iterable[Request]) -> list[LiveRequest]:
    """The requests of a trace that is cut into whole pages; a page id says all about a page and those before it."""
    return [
        LiveRequest(
            arrival_s=request.arrival_s,
            keys=tuple(page.to_bytes(16, "big") for page in pages_of(request.runs)),
            prompt_tokens=request.prompt_tokens,
            output_keys=tuple(page.to_bytes(16, "big") for page in pages_of(request.output_runs or ())),
            output_tokens=request.output_tokens,
            session=str(request.session) if request.session >= 0 else None,
        )
        for request in requests
    ]
