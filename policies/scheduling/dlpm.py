"""Deficit longest prefix match (Cao et al., Locality-aware Fair Scheduling in LLM Serving, 2025, arXiv 2501.14312)."""

from dataclasses import dataclass

from kvsim.core.queue_view import Waiting
from kvsim.core.subclassing import mypyc_attr
from kvsim.numbers import Real, check_settings
from kvsim.policies.context import PolicyContext
from kvsim.policies.scheduling.deficit_order import Client, Clients, DeficitOrder
from kvsim.policies.scheduling.kept_order import KeptOrder, KeptScheduling

CLIENTS = ("tenant", "session")


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(kw_only=True, eq=False)
class Dlpm(KeptScheduling):
    """Longest cached prefix first, as long as no client gets more than its share: locality, but no client starves.

    deficit           what a client may still use, in tokens; 0 when it is first seen
    order             requests of clients with a deficit above 0: most tokens cached first, as ``longest_prefix``; of equals, the
                      one that began to wait first
    admitted          its client's deficit falls by prefill_weight * tokens that are neither cached nor loaded
    generated         it falls by decode_weight * tokens
    nobody has any    each client with none left, waiting or not, gets quantum_tokens, until one that waits has some
    after retraction  as a new request: what is computed again is paid for again

    A larger quantum allows longer runs of one client's prefixes, and the bound on unfairness grows with it. The paper leaves it
    to the user; 8192 tokens are one full step of many engines. A token of an answer counts twice, as in the virtual token counter
    that it improves on. Its router for several engines (D2LPM) is left out. A trace without clients is refused.
    """

    client: str = "tenant"
    quantum_tokens: float = 8192.0
    prefill_weight: float = 1.0
    decode_weight: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.client not in CLIENTS:
            raise ValueError(f"client must be one of {', '.join(CLIENTS)}, not {self.client}")
        check_settings(self, Real(least=1), "quantum_tokens")
        check_settings(self, Real(least=0), "prefill_weight", "decode_weight")

    def bind(self, context: PolicyContext) -> None:
        context.require(self.client, f"the {self.client} of each request")
        self._clients = Clients(self.quantum_tokens)

    def _client(self, waiting: Waiting) -> Client:
        request = waiting.request
        return self._clients.of(request.tenant if self.client == "tenant" else request.session)

    def kept_order(self) -> KeptOrder:
        return DeficitOrder(self._clients, self._client)

    def on_admitted(self, waiting: Waiting, tokens: int) -> None:
        self._client(waiting).deficit -= self.prefill_weight * tokens

    def on_generated(self, waiting: Waiting, tokens: int) -> None:
        self._client(waiting).deficit -= self.decode_weight * tokens
