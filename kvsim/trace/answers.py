"""The pages of answers that a trace does not name, inferred from the prompts that go on from them."""

from kvsim.bounds.reuse import next_uses
from kvsim.core.request import Request
from kvsim.core.runs import split_runs

ANSWERS = ("none", "inferred")


def infer_answers(requests: list[Request], page_tokens: int) -> None:
    """Set ``output_runs`` of requests, in the order of their arrival, from later prompts; the cost is per run.

    An inference: the first later prompt that begins with all named pages of a prompt and goes on is taken for the next turn of
    its conversation, so what follows those pages there is the rest of the prompt and its answer, as far as the tokens of prompt
    and answer but one reach. That is wrong where two users part just behind a page, and blind to answers that are edited or
    left out of the next prompt. An answer from which nobody goes on has no pages: they would never be hit.
    """
    following: list[Request | None] = [None] * len(requests)
    uses = next_uses([request.runs for request in requests])
    later = {
        index: other
        for index, other, end in zip(uses.request.tolist(), uses.other.tolist(), uses.end.tolist(), strict=True)
        if end == requests[index].prompt_pages
    }
    for index in range(len(requests) - 1, -1, -1):
        request = requests[index]
        request.output_runs = ()
        if (other := later.get(index)) is None:
            continue
        is_longer = requests[other].prompt_pages > request.prompt_pages
        following[index] = follower = requests[other] if is_longer else following[other]
        pages = (request.prompt_tokens + request.output_tokens - 1) // page_tokens - request.prompt_pages
        if follower is not None and pages > 0:
            request.output_runs = split_runs(split_runs(follower.runs, request.prompt_pages)[1], pages)[0]
