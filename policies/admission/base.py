"""The contract of admission policies: which requests are served at all."""

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.policies.admission.context import AdmissionContext

ENGINE: Final = "engine"
CLUSTER: Final = "cluster"
GOES_BY: Final = (ENGINE, CLUSTER)
"""What an admission may go by; see ``AdmissionPolicy.goes_by``."""


class EngineLoad(Protocol):
    """What an admission policy knows of one engine, as it is now."""

    @property
    def engine(self) -> int:
        """The engine's number."""

    @property
    def waiting_requests(self) -> int:
        """Requests in its queue, those that wait for pages fetched for them included."""

    @property
    def running_requests(self) -> int:
        """Requests that it has admitted and that have not ended."""

    @property
    def kv_use(self) -> float:
        """Share of its KV capacity that requests use, 0 to 1: without cached pages that no request uses. 0 if it is unlimited."""

    @property
    def prefills(self) -> Sequence[tuple[int, int]]:
        """The prompts that it has yet to compute, in the order in which it got them, as (first token to compute, tokens): the
        tokens before the first were cached when the request came, or have been computed since."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute of these prompts."""

    @property
    def begun_prefills(self) -> Sequence[tuple[int, int]]:
        """Those among ``prefills`` that have their pages."""

    @property
    def queued_prefills(self) -> Sequence[tuple[int, int]]:
        """The others, which wait for their turn, for pages fetched for them, or for room."""

    @property
    def free_tokens(self) -> int:
        """Tokens for which its GPU has room: in free pages and in cached ones that no request uses."""

    @property
    def computing_s(self) -> float:
        """Seconds since its step under way has begun, if that computes prompts, which ``prefills`` still has; otherwise 0."""

    @property
    def decoding_requests(self) -> int:
        """Answers that are being generated: requests whose first token has passed and that have not ended."""

    @property
    def decoding_tokens(self) -> int:
        """Prompt tokens of these requests."""

    @property
    def answers(self) -> Sequence[tuple[int, int]]:
        """These requests, in the order in which they began to decode, as (prompt tokens, tokens of the answer so far): as the
        server has sent them. Without requests that have lost their pages again."""

    def uncached_tokens(self, request: Request) -> int:
        """Return the prompt tokens of a request that are neither on its GPU nor, after those, in the tier below, so that they are
        to be computed: at least 1. Changes nothing."""


class ClusterLoad(Protocol):
    """What an admission policy knows when a request has come."""

    @property
    def now(self) -> float:
        """The time, in seconds from the start of the run."""

    @property
    def waited_s(self) -> float:
        """Seconds since the request has arrived: above 0 if no engine was up, or the router has kept it."""

    @property
    def engines(self) -> Sequence[EngineLoad]:
        """Of a policy that goes by the engine, the one that the router has chosen; otherwise all that are up and compute prompts,
        by number. None may be up."""

    @property
    def decoders(self) -> Sequence[EngineLoad]:
        """The engines that decode: where prefill and decode are apart, all that decode and are up; otherwise ``engines``."""

    @property
    def kept_requests(self) -> int:
        """Requests that wait before the router, since no engine is up or the routing policy keeps them."""


@mypyc_attr(allow_interpreted_subclasses=True)
class AdmissionPolicy(metaclass=ABCMeta):
    """Says whether a request is served, or refused at once: its client gets an error (HTTP 429), and no engine computes it.

    It is asked once for each request that arrives, before an engine has it. A request that was admitted is not refused any more,
    not even when its engine fails.
    """

    @property
    def is_asked(self) -> bool:
        """Whether the policy is asked at all; otherwise every request is admitted, at no cost."""
        return True

    @property
    def goes_by(self) -> str:
        """What an answer depends on.

        engine    the engine that the router has chosen: it refuses the request, which the router has sent it, as servers do.
                  Each engine has a policy of its own
        cluster   all engines: the gateway refuses the request, of which the router does not hear
        """
        return ENGINE

    def bind(self, context: AdmissionContext) -> None:
        """Called once, before the run. Raises ValueError if something is missing."""

    def on_answered(self, request: Request, now: float) -> None:
        """Called when an answer is complete, so that its length is known: of a policy that goes by the engine, one of its engine.
        A request for several answers may be told once for each."""

    def without_effect(self) -> Sequence[str]:
        """Return the names of settings that have no effect because of the others: an error if the user gives one."""
        return ()

    @abstractmethod
    def admits(self, request: Request, load: ClusterLoad) -> bool:
        """Return whether a request is served."""
