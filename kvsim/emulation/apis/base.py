"""What the interfaces of emulated servers share: their routes, and answers as they grow."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from kvsim.emulation.emulator import Emulator, Served
from kvsim.emulation.http_server import BadRequest, Handler, HttpRequest, Reply
from kvsim.trace.base import MAX_TOKENS

T = TypeVar("T")
Routes = Mapping[tuple[str, str], Handler]
"""What answers a method and a path."""


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """How the emulated server was started."""

    model: str = "emulated"
    """The name of its model."""
    longest_tokens: int | None = None
    """The most tokens of a prompt and its answer; None: what the GPU's tier has room for."""
    tells_cached: bool = True
    """Whether it says how many tokens of a prompt were cached: vLLM's --enable-prompt-tokens-details."""
    tells_times: bool = True
    """Whether it says how long a request was queued: vLLM's --enable-per-request-metrics, SGLang's --enable-metrics."""
    has_reset: bool = True
    """Whether it can be told to empty its cache: vLLM's VLLM_SERVER_DEV_MODE=1."""


class Metric(NamedTuple):
    """One number of ``/metrics``."""

    name: str
    kind: str
    """counter or gauge."""
    value: float
    labels: Mapping[str, str]


class Api(ABC):
    """One interface over an emulator: answers requests by their method and path."""

    owner: ClassVar[str]
    """Who owns its models, as its list of models says."""

    def __init__(self, emulator: Emulator, settings: ApiSettings) -> None:
        self.emulator = emulator
        self.settings = settings
        plan = emulator.plan
        capacity = plan.tiers[0].capacity_pages
        self.capacity_tokens = None if capacity is None else capacity * plan.page_tokens
        """Of the GPU's tier."""
        self.longest_tokens = settings.longest_tokens or self.capacity_tokens
        self._routes: Routes = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            **self.routes(),
        }

    @abstractmethod
    def routes(self) -> Routes:
        """Return what it answers besides health, models and metrics."""

    @abstractmethod
    def metrics(self) -> list[Metric]:
        """Return its numbers as they are now."""

    async def answer(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request. Raises BadRequest."""
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            known = request.path in {path for _, path in self._routes}
            raise BadRequest(405, "Method Not Allowed") if known else BadRequest(404, "Not Found")
        await handler(request, reply)

    async def _health(self, request: HttpRequest, reply: Reply) -> None:
        await reply.whole(200)

    async def _models(self, request: HttpRequest, reply: Reply) -> None:
        card = {"id": self.settings.model, "object": "model", "owned_by": self.owner, "max_model_len": self.longest_tokens}
        await reply.whole(200, {"object": "list", "data": [card]})

    async def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        self.emulator.catch_up()
        await reply.whole(200, text_of(self.metrics()), "text/plain; version=0.0.4; charset=utf-8")

    def submit(self, tokens: list[int], output_tokens: int) -> Served:
        """Take a request that arrives now. Raises BadRequest for one that cannot be served."""
        if not tokens or not 1 <= output_tokens <= MAX_TOKENS:
            raise BadRequest(400, f"a request needs a prompt of token ids, and an answer of 1 to {MAX_TOKENS} tokens")
        longest = self.longest_tokens
        if longest is not None and len(tokens) + output_tokens > longest:
            raise BadRequest(400, f"This model's maximum context length is {longest} tokens, not {len(tokens)} + {output_tokens}")
        try:
            return self.emulator.submit(tokens, output_tokens)
        except ValueError as error:
            raise BadRequest(400, str(error)) from None

    def cached(self, served: Served) -> dict[str, int]:
        """Return the cached tokens of a request by tier."""
        return dict(zip(self.emulator.tier_names, served.cached_tokens, strict=False))

    def queued_s(self, served: Served) -> float:
        """Return how long a request was queued, in real time."""
        return served.queued_s / self.emulator.speed


async def growing(served: Served) -> AsyncIterator[int]:
    """Yield the number of tokens of an answer each time that it has grown. Raises BadRequest if the request is rejected."""
    told = 0
    while told < len(served.answer):
        if served.is_rejected:
            raise BadRequest(400, "the request does not fit the server's memory even alone")
        served.news.clear()
        if served.generated > told:
            told = served.generated
            yield told
        else:
            await served.news.wait()


def parsed(body: bytes, kind: type[T]) -> T:
    """Return a body of JSON as an object. Raises BadRequest if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise BadRequest(400, str(error)) from None


def text_of(metrics: Iterable[Metric]) -> str:
    """Return numbers in Prometheus' text format."""
    lines, typed = [], set[str]()
    for metric in metrics:
        family = metric.name.removesuffix("_total")
        if family not in typed:
            typed.add(family)
            lines.append(f"# TYPE {metric.name} {metric.kind}")
        labels = ",".join(f"{name}={_quoted(value)}" for name, value in metric.labels.items())
        lines.append(f"{metric.name}{{{labels}}} {float(metric.value)}")
    return "\n".join([*lines, ""])


def _quoted(value: Any) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def shown(token: int) -> str:
    """Return a token as text: the emulated model's tokens are words."""
    return f" t{token}"
