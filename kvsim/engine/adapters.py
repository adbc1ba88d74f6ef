"""LoRA adapters: which of them an engine's GPU has, which requests may run together, and what a step costs more.

vLLM has ``max_loras`` places for adapters on the GPU. A step has requests of no more adapters than that: a waiting request of
another one is passed over (``scheduled_loras`` in its ``v1/core/sched/scheduler.py``), and the adapter used longest ago gives up
its place (``LRUCacheWorkerLoRAManager`` in ``lora/worker_manager.py``). Kernels compute the adapters of a step together (Chen et
al.: Punica, MLSys 2024, arXiv:2310.18547).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvsim.core.request import Request
from kvsim.numbers import SECONDS, Whole, check_settings


@dataclass(kw_only=True)
class AdapterSettings:
    """The adapters of an engine."""

    max_loras: int = 0
    """Adapters that its GPUs have at a time; 0: adapters cost nothing."""
    adapter_bytes: int = 0
    """Bytes of one adapter, at two bytes for a parameter, on all GPUs together."""
    step_overhead_s: float = 0.0
    """What a step with adapters takes more, for the launch of its kernels."""

    def __post_init__(self) -> None:
        check_settings(self, Whole(0), "max_loras", "adapter_bytes")
        check_settings(self, SECONDS, "step_overhead_s")
        if self.is_on and not self.adapter_bytes:
            raise ValueError("adapter_bytes must be set with max_loras: it is the size of one adapter")

    @property
    def is_on(self) -> bool:
        """Whether adapters take room and time."""
        return self.max_loras > 0

    @property
    def all_bytes(self) -> int:
        """Bytes of the places for adapters."""
        return self.max_loras * self.adapter_bytes


class AdapterWork:
    """What adapters add to a step."""

    __slots__ = ("adapters", "loads", "tokens")

    def __init__(self, tokens: int, adapters: int, loads: int) -> None:
        self.tokens = tokens
        """Tokens of each step that are computed with an adapter."""
        self.adapters = adapters
        """Different adapters among them."""
        self.loads = loads
        """Those that have to be brought to the GPU first."""


class AdapterSlots:
    """The places for adapters on the GPUs of one engine."""

    def __init__(self, settings: AdapterSettings) -> None:
        self.settings = settings
        self._loaded: dict[str, None] = {}
        """Those on the GPU, the one used longest ago first."""
        self._together: set[str] = set()
        """Those of requests that run."""
        self._loads = self._uses = 0

    def begin_round(self, running: Iterable[Request]) -> None:
        """Begin to admit requests beside these."""
        self._together = {request.adapter for request in running if request.adapter}

    def takes(self, request: Request) -> bool:
        """Whether a request may run beside those that do."""
        adapter = request.adapter
        return not adapter or adapter in self._together or len(self._together) < self.settings.max_loras

    def admitted(self, request: Request) -> None:
        """Take note that a request runs beside the others from now on."""
        if request.adapter:
            self._together.add(request.adapter)
            self._uses += 1

    def use(self, tokens: Iterable[tuple[Request, int]]) -> AdapterWork | None:
        """Return what adapters add to a step of these requests and tokens, and bring them to the GPU; None without any."""
        computed, adapters = 0, dict[str, None]()
        for request, count in tokens:
            if request.adapter:
                computed += count
                adapters[request.adapter] = None
        if not adapters:
            return None
        loaded, loads = self._loaded, 0
        for adapter in adapters:
            loads += adapter not in loaded
            loaded.pop(adapter, None)
            loaded[adapter] = None
        while len(loaded) > self.settings.max_loras:
            del loaded[next(iter(loaded))]
        self._loads += loads
        return AdapterWork(computed, len(adapters), loads)

    def clear(self) -> None:
        """Forget all adapters, as when the engine fails."""
        self._loaded.clear()
        self._together.clear()

    def counts(self) -> dict[str, int]:
        """Return how often a request with an adapter began to run, and how often an adapter was brought to the GPU."""
        return {"uses": self._uses, "loads": self._loads}
