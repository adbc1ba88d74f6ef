"""How ``kvsim serve`` answers."""

from dataclasses import dataclass

from kvsim.emulation.apis.table import APIS
from kvsim.kv_events.dialects import dialect_named
from kvsim.numbers import MOST_SECONDS, Real, Whole, check_settings
from kvsim.trace.base import MAX_TOKENS

LAST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Where the servers listen, and how they answer. A wrong value raises ValueError."""

    host: str = "127.0.0.1"
    """The address that they listen on; others than this machine reach only 0.0.0.0 or an address of its own."""
    port: int = 8000
    """The port of the first engine, the others have the next ones; 0: free ports."""
    api: str | None = None
    """The interface, a name of ``APIS``; None: that of the engine whose rules are used."""
    model: str | None = None
    """The name of the model that clients ask for; None: that of its settings."""
    tokenizer: str | None = None
    """A folder with the model's tokenizer and chat template; None: prompts are token ids."""
    longest_tokens: int | None = None
    """The most tokens of a prompt and its answer; None: what the GPU's tier has room for."""
    speed: float = 1.0
    """How many times as fast as real time the engines run."""
    output_tokens: float | None = None
    """Mean length of answers whose clients do not insist on ``max_tokens`` by ``ignore_eos``; None: as many as they may have."""
    output_spread: float = 0.0
    """Sigma of the log-normal distribution of these lengths."""
    events: str | None = None
    """Where the first engine publishes its KV events, such as tcp://127.0.0.1:5557; the others have the next ports."""
    replay: str | None = None
    """Where lost events can be asked for again."""
    event_format: str | None = None
    """How events are written, a name of ``DIALECTS``; None: as the engine does now."""
    topic: str = ""
    """The topic of events."""
    self_describing: bool = False
    """Whether events of blocks below the GPU have tokens and parents, as with vLLM's self_describing_kv_events."""
    drain_s: float = 5.0
    """How long requests under way may go on after SIGTERM or Ctrl-C, before they are cut."""

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host is empty: set it to 127.0.0.1, 0.0.0.0 or an address of this machine")
        check_settings(self, Whole(0, LAST_PORT), "port", hint="0 takes free ports")
        if self.api is not None and self.api not in APIS:
            raise ValueError(f"api must be one of {', '.join(APIS)}, or null, not {self.api}")
        check_settings(self, Whole(2, MAX_TOKENS), "longest_tokens", or_null=True)
        check_settings(self, Real(above=0), "speed", hint="1 is real time")
        check_settings(self, Real(least=1, most=MAX_TOKENS), "output_tokens", or_null=True, hint="it is the mean of the answers")
        check_settings(self, Real(least=0, most=5), "output_spread")
        check_settings(self, Real(least=0, most=MOST_SECONDS), "drain_s")
        if self.event_format is not None:
            dialect_named(self.event_format)
        for name in ("replay", "event_format", "topic", "self_describing"):
            if getattr(self, name) and self.events is None:
                raise ValueError(f"{name} has no effect without events: set events=tcp://127.0.0.1:5557, or leave it out")
        if self.output_spread and self.output_tokens is None:
            raise ValueError("output_spread has no effect without output_tokens: set output_tokens, or leave it out")
