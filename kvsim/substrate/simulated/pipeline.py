"""Steps that pass the stages of a pipeline, one behind the other."""

from collections import deque
from math import isnan

from simpy import Environment, Event

from kvsim.engine.substrate import Work
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.model.stages import layers_of_stages, stages_of
from kvsim.substrate.simulated.communication import ACTIVATION_BYTES, Communication, tokens_of
from kvsim.substrate.simulated.compute import step_times
from kvsim.substrate.simulated.ends import Computed
from kvsim.substrate.simulated.links import Flow
from kvsim.substrate.simulated.warmth import WarmSteps

SENT_TENSORS = 2
"""What a stage sends of each token: the hidden state and the residual (``IntermediateTensors`` in vLLM's
``model_executor/models/llama.py``, ``PPProxyTensors`` in SGLang's ``srt/model_executor/forward_batch_info.py``)."""


class StageTimes:
    """What a step takes of each stage, of the links between them, and of the host."""

    def __init__(self, model: ModelSpec, hardware: HardwareSpec, *, engines: int = 1) -> None:
        self.hardware = hardware
        count = hardware.pipeline_parallel
        self.layers = layers_of_stages(model.layers, count)
        machines = [hardware.stage(layers / model.layers) for layers in self.layers]
        pairs = zip(stages_of(model, count), machines, strict=True)
        self.stages: list[WarmSteps] = []
        self._exchanges: list[Communication] = []
        for stage, machine in pairs:
            self.stages.append(WarmSteps(step_times(stage, machine), machine, engines=engines))
            self._exchanges.append(Communication(stage, machine))
        self._row_bytes = SENT_TENSORS * ACTIVATION_BYTES * model.hidden_size

    def send_s(self, work: Work) -> float:
        """Return the seconds that the activations of a step take from one stage to the next."""
        return self.hardware.stage_send_s(self._row_bytes * tokens_of(work))

    def exchange_s(self, work: Work) -> float:
        """Return the seconds in which the GPUs of a stage exchange activations, on average over the stages."""
        return sum([exchange.step_s(work) for exchange in self._exchanges]) / len(self._exchanges)

    def host_s(self, work: Work) -> float:
        """Return the seconds that a step takes of the host, where steps follow one another while stages compute others."""
        return self.hardware.host_s(has_prefill=bool(work.chunks), has_copies=work.has_copies)


class _Passing:
    """A step that has begun and has not been timed."""

    __slots__ = ("began_s", "done", "flows", "waiting", "work")

    def __init__(self, work: Work, flows: list[Flow], began_s: float, done: Event) -> None:
        self.work = work
        self.flows = flows
        self.began_s = began_s
        self.done = done
        self.waiting = len(flows)
        """Loads that have not landed."""


class Line:
    """The pipeline of one engine. A stage, or the host at its end, serves steps in the order in which they began.

    a stage    begins when the one before it has sent the step's activations and has served the step before
    the host   follows the last stage, and serves one step at a time, too
    loads      each stage's layers land evenly, on its own GPUs: it begins when the first one has landed, and computes the last
               one after that has
    """

    def __init__(self, env: Environment, times: StageTimes, computed: Computed | None) -> None:
        """``computed`` is told of each step as soon as its end is known."""
        self.env = env
        self.times = times
        self._computed = computed
        self._waiting: deque[_Passing] = deque()
        """Those whose loads, or those of one before them, have not landed."""
        self._timed: deque[tuple[Work, float]] = deque()
        """Steps and their ends, of which the last ones are in the future."""
        self._free_s = [0.0] * (len(times.stages) + 1)
        """When each stage, and the host, will have served all steps."""

    def begin(self, work: Work, flows: list[Flow]) -> Event:
        """Begin a step behind all others. The event's value is 1."""
        self._forget_cut()
        passing = _Passing(work, flows, self.env.now, self.env.event())
        self._waiting.append(passing)

        def landed(_: Event) -> None:
            passing.waiting -= 1
            self._time_all()

        for flow in flows:
            flow.event.then(landed)
        self._time_all()
        return passing.done

    def _forget_cut(self) -> None:
        """If the engine has failed, its GPUs do nothing more for steps that began before."""
        while self._timed and self._timed[0][1] <= self.env.now:
            self._timed.popleft()
        if any(work.is_cut for work, _ in self._timed) or any(passing.work.is_cut for passing in self._waiting):
            self._timed.clear()
            self._waiting.clear()
            self._free_s = [0.0] * len(self._free_s)

    def _time_all(self) -> None:
        """Find out when steps end, as far as that can be known."""
        while self._waiting and not self._waiting[0].waiting:
            self._time(self._waiting.popleft())

    def _time(self, passing: _Passing) -> None:
        work, now = passing.work, self.env.now
        free_s = self._free_s.copy()
        ends_s, stages_s, first_s = self._pass(passing, free_s, passing.flows)
        work.stages_s, work.exchange_s = sum(stages_s) / len(stages_s), self.times.exchange_s(work)
        if passing.flows:
            unhindered_s, _, _ = self._pass(passing, self._free_s.copy(), [], stages_s)
            work.stalled_s = ends_s - unhindered_s
        self._free_s = free_s
        self._timed.append((work, ends_s))
        if self._computed is not None:
            self._computed(work, first_s, ends_s)

        def end(_: Event) -> None:
            passing.done.succeed(1)

        self.env.timeout(max(0.0, ends_s - now)).callbacks.append(end)

    def _pass(
        self, passing: _Passing, free_s: list[float], flows: list[Flow], stages_s: list[float] | None = None
    ) -> tuple[float, list[float], float]:
        """Let a step pass all stages and the host, which are free at ``free_s``; changes it. Returns its end, the seconds of each
        stage, which may be known already, and when the first layer of all is computed."""
        times, work = self.times, passing.work
        at_s, send_s, taken_s, first_s = passing.began_s, times.send_s(work), list[float](), 0.0
        for stage, layers in enumerate(times.layers):
            at_s = max(at_s + (send_s if stage else 0.0), free_s[stage])
            for flow in flows:
                at_s = max(at_s, first_landed_s(flow, layers))
            seconds = times.stages[stage].leap_s(work, 1, at_s) if stages_s is None else stages_s[stage]
            taken_s.append(seconds)
            if not stage:
                first_s = at_s + seconds / layers
            at_s += seconds
            for flow in flows:
                at_s = max(at_s, flow.ended_s + seconds / layers)
            free_s[stage] = at_s
        free_s[-1] = max(at_s, free_s[-1]) + times.host_s(work)
        return free_s[-1], taken_s, first_s


def first_landed_s(flow: Flow, layers: int) -> float:
    """Return when the first of ``layers`` layers of a load that has ended had landed."""
    began_s = flow.ended_s if isnan(flow.started_s) else flow.started_s
    return began_s + (flow.ended_s - began_s) / layers
