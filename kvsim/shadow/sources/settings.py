"""Where ``kvsim shadow`` gets requests and events from, and where it shows what it found."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from kvsim.numbers import MOST_SECONDS, Real, Whole, check_settings
from kvsim.servers.settings import check_address

PORTS = Whole(0, 65535)
NEEDS = {
    "patience_s": ("listen",), "drain_s": ("listen",), "host": ("listen", "metrics_port"),
    "replay": ("events",), "ranks": ("events",), "topic": ("events",),
}  # fmt: skip
"""Settings, and those of which one must be set for them to have an effect."""
OF_LIVE_EVENTS = ("replay", "ranks", "topic")
"""Settings without effect on events that were recorded."""
ADDRESS = re.compile(r"[\w.*-]+:\d+")
"""A host and a port."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Sources and outputs. A wrong value raises ValueError."""

    events: list[str] = field(default_factory=list)
    """Addresses of engines' KV events, such as tcp://localhost:5557, or a file of recorded ones."""
    replay: list[str] = field(default_factory=list)
    """For each of ``events``, the address that sends missed ones again; empty: none."""
    ranks: int = 1
    """Data-parallel ranks of each engine, whose ports follow one another."""
    topic: str = ""
    """Only events of topics that begin so."""
    listen: int | None = None
    """Port of the proxy; 0: a free one."""
    host: str = "127.0.0.1"
    """Address that the proxy and the metrics listen on."""
    server: str | None = None
    """Address of the server behind the proxy."""
    log: str | None = None
    """A log that grows, or a folder of SGLang's exported metrics."""
    follow: bool = True
    """Whether to wait for what is appended to the log. False: stop at its end."""
    tokenizer: str | None = None
    """Folder of the model's tokenizer. None: pages are cut from the bytes of a text."""
    patience_s: float = 30.0
    """The proxy's requests are served by ghosts in order of arrival: longest time to wait for an earlier one's answer."""
    drain_s: float = 10.0
    """After Ctrl+C or SIGTERM: longest time to wait for answers on their way through the proxy."""
    requests: int | None = None
    """Stop after this many requests."""
    every_s: float = 2.0
    """Time from one refresh of table, page and metrics to the next."""
    page: str | None = None
    """The page. None: shadow.html in the output folder."""
    record: str | None = None
    """A trace file, for replays: lengths, times and salted hashes."""
    salt_file: str | None = None
    """The salt of the hashes, to go on with a recording. None: a new one that is not kept."""
    metrics_port: int | None = None
    """Port of the Prometheus metrics; 0: a free one. None: none."""

    def __post_init__(self) -> None:
        check_settings(self, PORTS, "listen", "metrics_port", or_null=True)
        check_settings(self, Whole(1, 1024), "ranks")
        check_settings(self, Real(least=0, most=MOST_SECONDS), "patience_s", "drain_s")
        check_settings(self, Real(least=0.1, most=3600), "every_s", hint="it is in seconds")
        check_settings(self, Whole(1), "requests", or_null=True, hint="null goes on until it is stopped")
        self._check_sources()
        if self.replay and len(self.replay) != len(self.events):
            raise ValueError(f"replay must name an address for each of events, {len(self.events)}, not {len(self.replay)}")
        for address, replay in zip(self.events, self.replay, strict=False):
            if replay and Path(address) in self.recorded and len(self.recorded) < len(self.events):
                raise ValueError(f"replay has no effect on the recorded events {address}: leave its place empty")
        if self.record is not None and self.record.endswith((".gz", ".zst")):
            raise ValueError(f"record must not end in .gz or .zst, as {self.record}: lines are appended one by one")
        if self.salt_file is not None and self.record is None:
            raise ValueError("salt_file has no effect without record: leave it out, or set shadow.record")

    def check_given(self, names: Collection[str]) -> None:
        """Raise ValueError if one of the settings that the user has given has no effect."""
        for name, needed in NEEDS.items():
            if name in names and all(getattr(self, one) in (None, []) for one in needed):
                raise ValueError(f"{name} has no effect without {' or '.join(needed)}: leave it out")
            if name in names and name in OF_LIVE_EVENTS and len(self.recorded) == len(self.events) > 0:
                raise ValueError(f"{name} has no effect on recorded events: leave it out")

    def _check_sources(self) -> None:
        """Raise ValueError for sources that exclude each other, or of which a part is missing."""
        for path in self.recorded:
            if ADDRESS.fullmatch(str(path)) and not path.exists():
                raise ValueError(f"events: {path} is no file; the address of an engine begins with tcp://, as tcp://{path}")
        if (self.listen is None) != (self.server is None):
            raise ValueError("listen=PORT and server=URL belong together: the proxy listens on the port and asks the server")
        if self.server is not None:
            check_address("server", self.server)
        if self.log is not None and self.listen is not None:
            raise ValueError("log and listen exclude each other: requests come from the one or the other")
        if not (self.events or self.log or self.listen is not None):
            raise ValueError("events, log or listen is missing: set events=tcp://HOST:PORT, log=FILE, or listen=PORT server=URL")
        if not self.follow and self.log is None and not self.recorded:
            raise ValueError("follow=false has no effect on what arrives over the network: leave it out, or set shadow.requests")
        if self.tokenizer is not None and self.log is None and self.listen is None:
            raise ValueError("tokenizer has no effect on events, which have no text: leave it out")

    @property
    def recorded(self) -> list[Path]:
        """The files of recorded events."""
        return [Path(name) for name in self.events if "://" not in name]

    @property
    def has_own_requests(self) -> bool:
        """Whether requests come from a proxy or a log."""
        return self.log is not None or self.listen is not None
