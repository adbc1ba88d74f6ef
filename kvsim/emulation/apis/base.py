"""What the interfaces of emulated servers share: their routes, how requests are taken, and answers as they grow."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.http_server import BadRequest, Handler, HttpRequest, Reply
from kvsim.emulation.lengths import AnswerLengths
from kvsim.emulation.metrics.base import Metrics
from kvsim.emulation.served import NO_EXTRAS, Extras, Served
from kvsim.emulation.text import Texts
from kvsim.trace.base import MAX_TOKENS

T = TypeVar("T")
Routes = Mapping[tuple[str, str], Handler]
"""What answers a method and a path."""
KINDS = {404: "NotFoundError", 429: "TooManyRequestsError", 500: "InternalServerError"}
MOST_ANSWERS = 1024
"""The most answers of one call."""
Prompt = list[int] | str


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
    texts: Texts | None = None
    """What makes tokens of text; None: prompts are token ids."""
    lengths: AnswerLengths = field(default_factory=AnswerLengths)


class Wanted(NamedTuple):
    """How long an answer shall be, as the client says it."""

    most: int | None
    """The most tokens; None: as many as the server thinks right."""
    least: int = 0
    default: int = 16
    """The most tokens of an answer whose client does not say it."""
    is_exact: bool = False
    """Whether it has as many tokens as it may: ``ignore_eos``."""


class Api(ABC):
    """One interface over an emulator: answers requests by their method and path."""

    engine: ClassVar[str]
    """Its name in the table of interfaces."""
    owner: ClassVar[str]
    """Who owns its models, as its list of models says."""
    metrics_of: ClassVar[type[Metrics] | None] = None
    """Its metrics; None: it has none."""

    def __init__(self, emulator: Emulator, settings: ApiSettings) -> None:
        self.emulator = emulator
        self.settings = settings
        plan = emulator.plan
        capacity = plan.tiers[0].capacity_pages
        self.capacity_tokens = None if capacity is None else capacity * plan.page_tokens
        """Of the GPU's tier."""
        self.longest_tokens = settings.longest_tokens or self.capacity_tokens
        if settings.texts is not None:
            emulator.vocabulary = settings.texts.words
        kind = self.metrics_of
        self.metrics = None if kind is None else kind(emulator, settings.model, self.longest_tokens)
        told: Routes = {} if self.metrics is None else {("GET", "/metrics"): self._metrics}
        self._routes: Routes = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            **told,
            **self.routes(),
        }

    @abstractmethod
    def routes(self) -> Routes:
        """Return what it answers besides health, models and metrics."""

    def error(self, status: int, message: str) -> dict[str, Any]:
        """Return the body of an error."""
        kind = KINDS.get(status, "BadRequestError")
        return {"error": {"message": message, "type": kind, "param": None, "code": status}}

    async def answer(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request."""
        handler = self._routes.get(("GET" if request.method == "HEAD" else request.method, request.path))
        try:
            if handler is None:
                known = request.path in {path for _, path in self._routes}
                raise BadRequest(405, "Method Not Allowed") if known else BadRequest(404, "Not Found")
            await handler(request, reply)
        except BadRequest as error:
            body = self.error(error.status, str(error))
            if not reply.has_begun:
                await reply.whole(error.status, body)
                return
            await reply.event(body)
            await reply.event("[DONE]")
            await reply.end()

    async def _health(self, request: HttpRequest, reply: Reply) -> None:
        await reply.whole(200)

    async def _models(self, request: HttpRequest, reply: Reply) -> None:
        name = self.settings.model
        card = {"id": name, "object": "model", "created": 0, "owned_by": self.owner, "root": name, "parent": None}
        await reply.whole(200, {"object": "list", "data": [card | {"max_model_len": self.longest_tokens}]})

    async def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        assert self.metrics is not None
        await reply.whole(200, *self.metrics.text())

    # --- requests ------------------------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raise BadRequest unless a model of this name is served; None is any."""
        if name not in (None, "", "default", self.settings.model):
            raise BadRequest(404, f"The model `{name}` does not exist.")

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt. Raises BadRequest for text without a tokenizer."""
        return prompt if isinstance(prompt, list) else self.texts.tokens(prompt)

    @property
    def texts(self) -> Texts:
        """What makes tokens of text. Raises BadRequest if nothing does."""
        if self.settings.texts is None:
            raise BadRequest(400, "this server has no tokenizer: send token ids, or start it with serve.tokenizer=DIR")
        return self.settings.texts

    @contextmanager
    def taken(
        self,
        prompts: Sequence[list[int]],
        wanted: Wanted,
        *,
        copies: int = 1,
        is_streamed: bool = False,
        extras: Extras = NO_EXTRAS,
    ) -> Iterator[list[Served]]:
        """Take requests that arrive now, each so many times; those that have not ended when the block is left are aborted.

        Raises BadRequest, with none taken, if one of them cannot be served.
        """
        if not 1 <= copies <= MOST_ANSWERS or len(prompts) * copies > MOST_ANSWERS:
            raise BadRequest(400, f"a request may ask for 1 to {MOST_ANSWERS} answers")
        for tokens in prompts:
            self._check(tokens, wanted)
        served: list[Served] = []
        try:
            for tokens in prompts:
                for _ in range(copies):
                    served.append(self._submit(tokens, wanted, is_streamed=is_streamed, extras=extras))
            yield served
        finally:
            for one in served:
                self.emulator.abort(one)

    def _check(self, tokens: list[int], wanted: Wanted) -> None:
        most = 1 if wanted.most is None else wanted.most
        if not tokens or not 1 <= most <= MAX_TOKENS or not 0 <= wanted.least <= (wanted.most or wanted.default):
            raise BadRequest(400, f"a request needs a prompt, and an answer of 1 to {MAX_TOKENS} tokens")
        if min(tokens) < 0 or max(tokens) >= 1 << 63:
            raise BadRequest(400, "token ids must lie in 0 ... 2**63 - 1")
        longest = self.longest_tokens
        if longest is not None and len(tokens) + most > longest:
            raise BadRequest(400, f"This model's maximum context length is {longest} tokens, not {len(tokens)} + {most}")

    def _submit(self, tokens: list[int], wanted: Wanted, *, is_streamed: bool, extras: Extras) -> Served:
        longest, most = self.longest_tokens, wanted.most
        output, limit = self.settings.lengths.draw(most, wanted.least, wanted.default)
        if wanted.is_exact and most is not None:
            output = most
        if longest is not None:
            output, limit = min(output, longest - len(tokens)), min(limit, longest - len(tokens))
        return self.emulator.submit(tokens, output, most_tokens=limit, is_streamed=is_streamed, extras=extras)

    # --- answers -------------------------------------------------------------------------------------------------------------

    def shown(self, tokens: Sequence[int]) -> str:
        """Return tokens as text; without a tokenizer, the emulated model's tokens are words."""
        texts = self.settings.texts
        return "".join(f" t{token}" for token in tokens) if texts is None else texts.text(tokens)

    def cached(self, served: Served) -> dict[str, int]:
        """Return the cached tokens of a request by tier."""
        return dict(zip(self.emulator.tier_names, served.cached_tokens, strict=False))

    def queued_s(self, served: Served) -> float:
        """Return how long a request was queued, in real time."""
        return served.queued_s / self.emulator.speed


async def growing(served: Served) -> AsyncIterator[int]:
    """Yield the number of tokens of an answer each time that it has grown. Raises BadRequest if the request is rejected or
    shed."""
    told = 0
    while told < len(served.answer):
        if served.is_shed:
            raise BadRequest(429, "the server is overloaded: the request was refused; try again later")
        if served.is_rejected:
            raise BadRequest(400, "the request does not fit the server's memory even alone")
        served.news.clear()
        if served.generated > told:
            told = served.generated
            yield told
        else:
            await served.news.wait()


async def complete(served: Sequence[Served]) -> None:
    """Wait until all of these answers are complete. Raises BadRequest if a request is rejected or shed."""
    for one in served:
        async for _ in growing(one):
            pass


def parsed(body: bytes, kind: type[T]) -> T:
    """Return a body of JSON as an object. Raises BadRequest if it is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError as error:
        raise BadRequest(400, str(error)) from None
    except RecursionError:
        raise BadRequest(400, "the body is nested too deeply") from None
