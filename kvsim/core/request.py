"""A request, as the cache and the engine see it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvsim.pages.extents import Extent

RESETS = ("drain", "now")
"""What a reset of the cache waits for: ``drain`` for all running requests; ``now`` for nothing, so that their pages are freed
when they end, and what they compute from then on is not cached."""


class Reset(NamedTuple):
    """Every page is dropped, because the model's weights have changed."""

    mode: str
    """One of ``RESETS``."""
    at_s: float
    """Seconds since the start of the trace; nan: just before the request that it belongs to arrives."""


class RetentionRange(NamedTuple):
    """What a client says of a stretch of its request's tokens: how important it is to keep them, and for how long."""

    begin: int
    """First token, counted from the start of the prompt; the answer's tokens follow the prompt's."""
    end: int
    """The token after the last."""
    priority: int
    """0 to 100; higher is more important."""
    duration_s: float
    """Seconds from the request's end after which the priority is what it is without a directive; infinite: it stays."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and the length of its answer.

    ``runs`` has the page ids of the prompt in order, as extents: all full pages and, if the trace is read with ``tail=all``, the
    trailing partial page. It is normalised: no extent begins where the previous one ends.
    """

    index: int
    """Position in the trace; requests are numbered in arrival order."""
    arrival_s: float
    """Seconds since the start of the trace. In a closed loop (``after`` >= 0) the recorded time, used for ordering only."""
    prompt_tokens: int
    output_tokens: int
    runs: tuple[Extent, ...]
    prompt_pages: int
    """Pages in ``runs``."""
    after: int = -1
    """Closed loop: index of the request that must complete first; -1 if this request arrives at ``arrival_s``."""
    delay_s: float = 0.0
    """Closed loop: seconds from that completion, with ``joins`` from the last one, to this arrival (a tool call, a pause by the
    user)."""
    joins: tuple[int, ...] = ()
    """Closed loop: further requests that must complete first, such as the last ones of sub-agents; () unless ``after`` >= 0."""
    session: int = -1
    """Number of the conversation or agent session; -1 if the trace has no sessions."""
    turn: int = 0
    """Position within the session."""
    kind: str = ""
    """The trace's own request type (chat, agent, subagent, ...), for policies that use it."""
    priority: int = 0
    """Higher is more important; for policies that use it."""
    retention: tuple[RetentionRange, ...] = ()
    """Directives of its client, in order, without overlaps; for policies that use them."""
    tenant: str = ""
    """Whose request it is, if the trace says so."""
    adapter: str = ""
    """The LoRA adapter that it is computed with; "": none. Requests with different ones share no pages."""
    output_runs: tuple[Extent, ...] | None = None
    """Page ids after the prompt's ``runs`` in prompt + answer[:-1], full pages only; None if the trace has no answer tokens."""
    own_path: tuple[Extent, ...] | None = None
    """Page ids of prompt + answer[:-1], full pages only, where everything after the trace's last full block has ids that no other
    request has; None unless the trace is read with ``answers=unique``."""
    persistent: bool = False
    """Whether the prompt's pages stay on the GPU for good once the request has ended."""
    bigram: bool = False
    """Whether keys are made of pairs of tokens, as in SGLang with EAGLE: a page's key depends on the token after it, too."""
    samples: int = 1
    """Answers to this prompt, each of ``output_tokens`` tokens; 0: the prompt is computed only so that others find it. How they
    begin is a matter of the rules (``FanOut``)."""
    sample: int = 0
    """Which of its request's samples this is."""
    sample_output_runs: tuple[tuple[Extent, ...], ...] = ()
    """``output_runs`` of the samples after the first; () if only the first one's are known."""
    images: tuple[tuple[int, int], ...] = ()
    """Stretches (first token, token after the last) of the prompt that are computed as a whole, such as an image that a vision
    encoder turns into embeddings: no hit ends inside one. In order, without overlaps."""
    resets: tuple[Reset, ...] = ()
    """Resets of the cache between the request before this one and this one, in order."""

    @property
    def predecessors(self) -> tuple[int, ...]:
        """Indices of all requests that must complete first; () if this one arrives at ``arrival_s``."""
        return (self.after, *self.joins) if self.after >= 0 else ()

    def other_samples(self) -> "list[Request]":
        """Return a request for each sample after the first. They have the index of this one."""
        unknown = None if self.output_runs is None else ()
        return [
            replace(
                self,
                samples=1,
                sample=number,
                output_runs=self.sample_output_runs[number - 1] if self.sample_output_runs else unknown,
                sample_output_runs=(),
                resets=(),
            )
            for number in range(1, self.samples)
        ]

    def apart(self) -> "list[Request]":
        """Return a request for each sample, the first included. They have the index of this one."""
        return [replace(self, samples=1, sample_output_runs=(), resets=()), *self.other_samples()]

    def prompt_only(self) -> "Request":
        """Return a request that computes this one's prompt and has no answer."""
        answer = None if self.output_runs is None else ()
        return replace(self, samples=0, output_tokens=0, output_runs=answer, sample_output_runs=(), own_path=None, resets=())

    def pages_in_all(self, page_tokens: int) -> int:
        """Return how many pages the prompt and the whole answer take, or all answers if there are several samples."""
        pages = self.pages_for(self.prompt_tokens + self.output_tokens, page_tokens)
        return pages if self.samples == 1 else self.pages_with_all(pages, page_tokens)

    def pages_with_all(self, pages: int, page_tokens: int) -> int:
        """Return the pages that all samples need if each takes ``pages``: they share those of the prompt in ``runs``.

        Those that another sample does not find, as the last token whose KV others can find is among them, or an image ends
        there, are taken once more while it computes them again.
        """
        shared, samples = self.prompt_pages, max(self.samples, 1)
        again = shared - self.pages_outside_images(self.lookup_pages(page_tokens), page_tokens) if samples > 1 else 0
        return shared + samples * (pages - shared) + again

    def pages_outside_images(self, pages: int, page_tokens: int) -> int:
        """Return the most pages, up to ``pages``, after which no image is incomplete."""
        for begin, end in reversed(self.images):
            if begin < pages * page_tokens < end:
                pages = begin // page_tokens
        return pages

    def pages_for(self, tokens: int, page_tokens: int) -> int:
        """Return how many pages hold its first ``tokens`` tokens, the prompt included; a partial page counts."""
        pages = -(-tokens // page_tokens)
        return pages if pages > self.prompt_pages else self.prompt_pages

    def pages_of_sample(self, page_tokens: int, *, hold_output: bool) -> int:
        """Return how many pages it takes while it runs, with its output or without; for several samples, those of one."""
        if not hold_output:
            return self.prompt_pages
        return self.pages_for(self.prompt_tokens + self.output_tokens, page_tokens)

    def lookup_pages(self, page_tokens: int) -> int:
        """Return how many leading pages a look-up covers that leaves out the prompt's last token, which is always computed.

        Of n tokens it covers n - 1, which make n - 1 keys or n - 2 pairs.
        """
        pages = (self.prompt_tokens - 1 - self.bigram) // page_tokens
        if pages > self.prompt_pages:
            return self.prompt_pages
        return pages if pages > 0 else 0


def after_and_joins(predecessors: Iterable[int]) -> tuple[int, tuple[int, ...]]:
    """Return ``after`` and ``joins`` of a request that waits for all of these, each once; -1 and () if there are none."""
    found = list(dict.fromkeys(predecessors))
    return (found[0], tuple(found[1:])) if found else (-1, ())
