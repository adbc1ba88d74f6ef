"""The simulated substrate: links, disk and compute on SimPy's virtual clock."""

from collections.abc import Callable
from math import isnan
from typing import Any, cast

from simpy import Environment, Event

from kvsim.core.subclassing import mypyc_attr
from kvsim.core.tier import Edge
from kvsim.core.transfer import Transfer
from kvsim.engine.adapters import AdapterSettings
from kvsim.engine.job import Send
from kvsim.engine.layout import ONE_ENGINE, Layout
from kvsim.engine.link_use import LinkUse
from kvsim.engine.speculation import Speculation
from kvsim.engine.substrate import Work, request_of
from kvsim.engine.waiter import Waiter
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.substrate.simulated.clock import VirtualClock
from kvsim.substrate.simulated.communication import Communication
from kvsim.substrate.simulated.compute import counts_repeated
from kvsim.substrate.simulated.ends import Followed, Leap
from kvsim.substrate.simulated.engine_steps import engine_steps
from kvsim.substrate.simulated.links import Channel, Flow
from kvsim.substrate.simulated.noisy_steps import steps_of_run
from kvsim.substrate.simulated.pipeline import Line, StageTimes
from kvsim.substrate.simulated.ranks import Ranks, Split
from kvsim.substrate.simulated.sending import Sending
from kvsim.substrate.simulated.warmth import WarmSteps
from kvsim.substrate.simulated.wiring import Wiring


class Arrival(Waiter):
    """Takes note of the end of a transfer."""

    __slots__ = ("flow", "flows", "transfer")

    def __init__(self, flows: dict[Transfer, Flow], transfer: Transfer, flow: Flow) -> None:
        self.flows = flows
        self.transfer = transfer
        self.flow = flow

    def happened(self, event: Any) -> None:
        transfer, flow = self.transfer, self.flow
        del self.flows[transfer]
        if flow.split is not None:
            transfer.has_fault = flow.split.failed and not transfer.goes_down and not isnan(flow.started_s)


@mypyc_attr(allow_interpreted_subclasses=True)
class SimulatedSubstrate:
    """Simulates a channel for each direction between two tiers, and the duration of steps on the GPUs.

    Rates are the machine's, or those of its curves at the run's page size.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareSpec,
        page_tokens: int,
        *,
        links: str,
        seed: int = 0,
        layout: Layout = ONE_ENGINE,
        speculation: Speculation | None = None,
        lora: AdapterSettings | None = None,
    ) -> None:
        clock = VirtualClock()
        self.env: Environment = clock
        self.agenda = clock.agenda
        self.page_tokens, self.page_bytes = page_tokens, model.page_bytes(page_tokens)
        self.layers = model.layers
        self.hardware = hardware
        self.steps = engine_steps(steps_of_run(model, hardware, seed=seed, engines=layout.engines), hardware, speculation, lora)
        self._counts_repeated = counts_repeated(hardware)
        self.warm_steps = WarmSteps(self.steps, hardware, engines=layout.engines)
        copies = model.kv_copies(hardware.attention_gpus)
        self.wiring = Wiring(self.agenda, hardware, self.page_bytes, model.attention_layers, layout, links, copies)
        self.ranks = Ranks(hardware, seed) if hardware.rank_jitter or hardware.rank_faults or hardware.noise else None
        """None: all ranks are alike, have no noise, and move the same pages at any time."""
        self.flows: dict[Transfer, Flow] = {}
        self.sending = Sending(self.env, self.wiring, model.kv_bytes_per_token, self.layers) if layout.pairs else None
        self._exchanges = Communication(model, hardware) if hardware.expert_parallel > 1 else None
        """What is told of the GPUs' exchange, if there is only one stage."""
        self.lines: list[Line] = []
        """Each engine's pipeline, if there is more than one stage."""
        if hardware.pipeline_parallel > 1:
            self._exchanges = None
            times = StageTimes(model, hardware, engines=layout.engines)
            computed = self.sending.step if self.sending is not None else None
            self.lines = [Line(self.env, times, computed) for _ in range(layout.engines)]

    @property
    def channels(self) -> dict[str, Channel]:
        """The channels of the first engine, by name."""
        return self.wiring.of_engine(0)

    def request_s(self, prompt_tokens: int) -> float:
        return self.hardware.request_s(prompt_tokens)

    def copy(self, transfer: Transfer) -> Event:
        """Begin a transfer. Pages arrive in order, so a cancelled copy has brought the first pages completely."""
        slot_bytes = transfer.target.slot_bytes or self.page_bytes
        speed = 1.0 if transfer.target.slot_bytes is None else self.wiring.state_speeds.get(transfer.name, 1.0)
        if self.ranks is None and speed == 1.0:
            flow = self.wiring.channel(transfer).send(transfer.pages * slot_bytes, slot_bytes, None, request_of(transfer))
        else:
            flow = self._send_by_rank(transfer, slot_bytes, speed)
        self.flows[transfer] = flow
        flow.event.then(Arrival(self.flows, transfer, flow))
        return cast(Event, flow.event)

    def _send_by_rank(self, transfer: Transfer, slot_bytes: int, speed: float) -> Flow:
        """Send a transfer that occupies its link until the slowest rank has ended, at a multiple of the link's rate."""
        pages, channel = transfer.pages, self.wiring.channel(transfer)
        split = None if self.ranks is None else self.ranks.split(transfer.name, pages, slot_bytes, channel.use.owner)
        if speed != 1.0:
            speeds, limits = ([1.0], None) if split is None else (split.speeds, split.limits)
            split = Split(pages, slot_bytes, [speed * each for each in speeds], limits)
        n_bytes = pages * slot_bytes if split is None else split.work_bytes
        return channel.send(n_bytes, slot_bytes, split, request_of(transfer))

    def cancel(self, transfer: Transfer) -> None:
        if transfer in self.flows:
            self.wiring.channel(transfer).cancel(self.flows[transfer])

    def follows(self, load: Transfer) -> bool:
        return True

    def queued_s(self, edge: Edge) -> float:
        return self.wiring.reads(edge).queued_s()

    def compute(self, work: Work, loads: list[Transfer]) -> Event:
        if self._counts_repeated:
            work.count_repeated(self.page_tokens)
        flows = [self.flows[load] for load in loads if load in self.flows] if loads else []
        if self._exchanges is not None:
            work.exchange_s = self._exchanges.step_s(work)
        if self.lines:
            return self.lines[work.engine].begin(work, flows)
        if flows:
            return self._compute_behind(work, flows)
        if work.max_steps > 1:
            return self._leap(work)
        now = self.agenda.now
        step_s = self.warm_steps.leap_s(work, 1, now)
        if self.sending is not None:
            self.sending.step(work, now + step_s / self.layers, now + step_s)
        return cast(Event, self.agenda.timeout(step_s, 1))

    def _leap(self, work: Work) -> Event:
        """Take several steps in one event, unless ``work.stop`` triggers: then the leap ends at the next step boundary."""
        leap = Leap(self.agenda, self.steps, work)
        if work.stop is not None:
            if work.stop.processed:
                leap.happened(work.stop)
            else:
                work.stop.callbacks.append(leap)
        return cast(Event, leap.done)

    def steps_done(self, work: Work, elapsed_s: float) -> int:
        steps, seconds = self.steps.steps_by(work, elapsed_s, work.max_steps)
        return steps if seconds <= elapsed_s and steps < work.max_steps else steps - 1

    def _compute_behind(self, work: Work, flows: list[Flow]) -> Event:
        """Take one step while its loads land."""
        compute_s = self.warm_steps.leap_s(work, 1, self.agenda.now)
        computed = self.sending.step if self.sending is not None else None
        return cast(Event, Followed(self.agenda, work, flows, compute_s, self.layers, computed).done)

    def hand_over(self, send: Send) -> Event:
        assert self.sending is not None
        return self.sending.finish(send)

    def withdraw(self, send: Send) -> None:
        assert self.sending is not None
        self.sending.withdraw(send)

    def on_loss(self, lost: Callable[[int], None]) -> None:
        """Do nothing: engines fail only as the run's settings say."""

    def link_use(self) -> list[LinkUse]:
        return self.wiring.used()

    def findings(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Do nothing: there are no resources to release."""
