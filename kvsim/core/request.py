"""A request, as the cache and the engine see it."""

from dataclasses import dataclass

from kvsim.core.runs import Run


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and the length of its answer.

    ``runs`` holds the page ids of the prompt in order: all full pages and, if the trace is read with ``tail=all``, the
    trailing partial page. It is normalised: no run begins where the previous one ends.
    """

    index: int
    """Position in the trace; requests are numbered in arrival order."""
    arrival_s: float
    """Seconds since the start of the trace. In a closed loop (``after`` >= 0) the recorded time, used for ordering only."""
    prompt_tokens: int
    output_tokens: int
    runs: tuple[Run, ...]
    prompt_pages: int
    """Pages in ``runs``."""
    after: int = -1
    """Closed loop: index of the request that must complete first; -1 if this request arrives at ``arrival_s``."""
    delay_s: float = 0.0
    """Closed loop: seconds from that completion to this arrival (a tool call, a pause by the user)."""
    session: int = -1
    """Number of the conversation or agent session; -1 if the trace has no sessions."""
    turn: int = 0
    """Position within the session."""
    kind: str = ""
    """The trace's own request type (chat, agent, subagent, ...), for policies that use it."""
    priority: int = 0
    """Higher is more important; for policies that use it."""
    output_runs: tuple[Run, ...] | None = None
    """Page ids after the prompt's ``runs`` in prompt + answer[:-1], full pages only; None if the trace has no answer tokens."""
    own_path: tuple[Run, ...] | None = None
    """Page ids of prompt + answer[:-1], full pages only, where everything after the trace's last full block has ids that no other
    request has; None unless the trace is read with ``answers=unique``."""
    persistent: bool = False
    """Whether the prompt's pages stay on the GPU for good once they are computed."""
    bigram: bool = False
    """Whether keys are made of pairs of tokens, as in SGLang with EAGLE: a page's key depends on the token after it, too."""

    def pages_for(self, tokens: int, page_tokens: int) -> int:
        """Return how many pages hold its first ``tokens`` tokens, the prompt included; a partial page counts."""
        return max(self.prompt_pages, -(-tokens // page_tokens))

    def lookup_pages(self, page_tokens: int) -> int:
        """Return how many leading pages a look-up covers that leaves out the prompt's last token, which is always computed.

        Of n tokens it covers n - 1, which make n - 1 keys or n - 2 pairs.
        """
        return max(0, min(self.prompt_pages, (self.prompt_tokens - 1 - self.bigram) // page_tokens))
