"""What the cache and the engine know of a request."""

from dataclasses import dataclass

from kvsim.core.runs import Run


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt and the length of its answer.

    ``runs`` are the page ids of the prompt in order, the full pages and, if the trace is read with ``tail=all``, the
    trailing partial one. ``runs`` is normalised: no run begins where the one before it ends.
    """

    index: int
    """Position in the trace; requests are numbered in the order of their arrival."""
    arrival_s: float
    """Seconds since the start of the trace. In a closed loop (``after`` >= 0) the recorded time, for ordering only."""
    prompt_tokens: int
    output_tokens: int
    runs: tuple[Run, ...]
    prompt_pages: int
    """Pages in ``runs``."""
    after: int = -1
    """Closed loop: index of the request whose completion this one waits for; -1 arrives at ``arrival_s``."""
    delay_s: float = 0.0
    """Closed loop: seconds between that completion and this arrival (tool call, user's pause)."""
    session: int = -1
    """Number of the conversation or agent session; -1 if the trace has none."""
    turn: int = 0
    """Position within the session."""
    kind: str = ""
    """The trace's own request type (chat, agent, subagent, ...), for policies that use it."""
    priority: int = 0
    """Higher is more important; for policies that use it."""
    output_runs: tuple[Run, ...] | None = None
    """Page ids that follow the prompt's ``runs`` in prompt + answer[:-1], full pages only; None if the trace does not know."""
    persistent: bool = False
    """Whether the prompt's pages, once computed, stay on the GPU for good."""
