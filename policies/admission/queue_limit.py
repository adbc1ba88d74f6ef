"""Limits on what waits at engines: SGLang's ``--max-queued-requests``, and the thresholds of a busy worker in NVIDIA Dynamo."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, Whole, check_settings
from kvsim.policies.admission.base import ENGINE, GOES_BY, AdmissionPolicy, ClusterLoad, EngineLoad
from kvsim.policies.fields import keep_types


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class QueueLimit(AdmissionPolicy):
    """Refuses a request while engines are busy: while more waits than they should have.

    an engine is busy   at least waiting_requests requests wait there, or more than prefill_tokens prompt tokens are to be
                        computed, or requests use more than the share kv_use of its KV; a limit of null is none
    of: engine          refused if the engine that the router has chosen is busy, as SGLang's server refuses
    of: cluster         refused if all engines are busy, as Dynamo's router refuses. Requests that the routing policy keeps wait
                        at every engine

    With one engine, both are the same. Dynamo's router sends nothing to a busy engine while another one is not; here, the
    routing policy chooses among all.
    """

    of: str = ENGINE
    waiting_requests: int | None = 5
    prefill_tokens: int | None = None
    kv_use: float | None = None

    def __post_init__(self) -> None:
        if self.of not in GOES_BY:
            raise ValueError(f"of must be one of {', '.join(GOES_BY)}, not {self.of}")
        check_settings(self, Whole(1), "waiting_requests", or_null=True)
        check_settings(self, Whole(), "prefill_tokens", or_null=True)
        check_settings(self, Real(least=0, most=1), "kv_use", or_null=True)
        if self.waiting_requests is None and self.prefill_tokens is None and self.kv_use is None:
            raise ValueError("needs a limit: set waiting_requests, prefill_tokens or kv_use, or set admission=none")

    @property
    def goes_by(self) -> str:
        return self.of

    def admits(self, request: Request, load: ClusterLoad) -> bool:
        engines: Sequence[EngineLoad] = load.engines
        kept = 0 if self.of == ENGINE else load.kept_requests
        return not engines or any(not self.is_busy(engine, kept) for engine in engines)

    def is_busy(self, engine: EngineLoad, kept: int = 0) -> bool:
        """Return whether an engine has too much to do, with ``kept`` requests more in its queue."""
        if self.waiting_requests is not None and engine.waiting_requests + kept >= self.waiting_requests:
            return True
        if self.prefill_tokens is not None and engine.prefill_tokens > self.prefill_tokens:
            return True
        return self.kv_use is not None and engine.kv_use > self.kv_use


keep_types(QueueLimit, waiting_requests=int | None, prefill_tokens=int | None, kv_use=float | None)
