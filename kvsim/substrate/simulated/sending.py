"""Simulates the way of a prompt's KV from the GPU that computes it to the one that will decode."""

from functools import partial

from simpy import Environment, Event

from kvsim.engine.job import Send
from kvsim.engine.substrate import Work
from kvsim.substrate.simulated.links import Flow
from kvsim.substrate.simulated.wiring import Wiring


class Sending:
    """Sends the KV of each chunk when its layers are computed, and reports when the last layer has landed.

    A layer can leave when it is computed, and layers are computed evenly over a step. So a chunk's bytes leave at the rate of
    the link from the end of the step's first layer on, and the last layer lands no earlier than the step's end plus the time
    of one layer on an idle link. What the sender had cached, and the receiver lacks, leaves with the first chunk.
    """

    def __init__(self, env: Environment, wiring: Wiring, token_bytes: float, layers: int) -> None:
        self.env = env
        self.wiring = wiring
        self.token_bytes = token_bytes
        self.layers = layers

    def step(self, work: Work, first_s: float, end_s: float) -> None:
        """Send what a step adds to prompts whose first layer is computed at ``first_s``, and the last one at ``end_s``."""
        for (job, tokens), (_, start) in zip(work.prefilling, work.chunks, strict=True):
            send = job.send
            if send is not None and send.is_layerwise:
                leaves = self.env.timeout(max(0.0, first_s - self.env.now))
                leaves.callbacks.append(partial(self._leave, send, start + tokens, end_s))

    def _leave(self, send: Send, until: int, end_s: float, _: Event | None = None) -> None:
        """Hand the KV of all tokens before ``until`` that have not been sent to the link."""
        tokens = until - send.next_token
        if tokens <= 0 or send.is_withdrawn:
            return
        send.next_token = until
        channel = self.wiring.pairs[send.sender, send.receiver]
        n_bytes = tokens * self.token_bytes
        flow: Flow = channel.send(n_bytes, None, None, send.target.request.index)
        send.flows.append(flow)
        send.last_s = max(send.last_s, end_s + n_bytes / self.layers / channel.bytes_per_s + channel.latency_s)

    def finish(self, send: Send) -> Event:
        """Send what is left of a computed prompt. The event occurs when everything has landed."""
        self._leave(send, send.tokens, self.env.now if send.is_layerwise else 0.0)
        done = self.env.event()
        flying = [flow for flow in send.flows if not flow.event.processed]
        waiting = len(flying)

        def landed(_: Event | None) -> None:
            nonlocal waiting
            waiting -= 1
            if waiting <= 0 and not send.is_withdrawn and not done.triggered:
                self.env.timeout(max(0.0, send.last_s - self.env.now)).callbacks.append(arrived)

        def arrived(_: Event) -> None:
            done.succeed()

        for flow in flying:
            flow.event.callbacks.append(landed)
        if not flying:
            landed(None)
        return done

    def withdraw(self, send: Send) -> None:
        """Stop sending: the sender or the receiver has failed."""
        send.is_withdrawn = True
        channel = self.wiring.pairs[send.sender, send.receiver]
        for flow in send.flows:
            channel.cancel(flow)
