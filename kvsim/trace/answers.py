"""Page ids for answers that a trace does not contain: inferred from later prompts that continue them, or unique."""

from kvsim.bounds.reuse import next_uses
from kvsim.core.request import Request
from kvsim.pages.extents import append_extent, split_extents
from kvsim.trace.blocks import BlockPages

ANSWERS = ("none", "inferred", "unique")


def infer_answers(requests: list[Request], page_tokens: int) -> None:
    """Set ``output_runs`` of requests, given in order of arrival, from later prompts. The cost grows with extents, not pages.

    The first later prompt that begins with all pages of a prompt and is longer is assumed to be the next turn of its
    conversation. The pages that follow there are then the rest of the prompt and its answer, up to all but the last token of
    the answer. The guess is wrong where two users' prompts diverge exactly at the end of those pages, and it misses answers that
    are edited or left out of the next prompt. An answer that no prompt continues gets no pages: they would never be hit.
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
            request.output_runs = split_extents(split_extents(follower.runs, request.prompt_pages)[1], pages)[0]


def make_answer_unique(request: Request, pages: BlockPages) -> None:
    """Set ``output_runs`` and ``own_path`` to page ids that no other request has, so that its answer is stored but never hit."""
    total = (request.prompt_tokens + max(request.output_tokens, 1) - 1) // pages.page_tokens
    shared = min(request.prompt_pages, request.prompt_tokens // pages.block_tokens * pages.block_tokens // pages.page_tokens)
    first = pages.reserve(total - shared)
    answer = total - request.prompt_pages
    request.output_runs = ((first + request.prompt_pages - shared, answer),) if answer else ()
    path = list(split_extents(request.runs, shared)[0])
    if total > shared:
        append_extent(path, first, total - shared)
    request.own_path = tuple(path)
