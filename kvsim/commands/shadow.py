"""``kvsim shadow``: watches live engines, and tells what other caches would find in the same requests."""

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import gcd
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from kvsim.commands.application import run_application
from kvsim.engine.collector import seldom_collecting
from kvsim.errors import UsageError, WrongResult
from kvsim.files.locking import Lock
from kvsim.plans.build import SHADOW, build_run
from kvsim.plans.construct import construct
from kvsim.plans.plan import Plan
from kvsim.report.shadow.live_table import LiveTable
from kvsim.settings.configuration import Asked, check_run_here, quoted, without_hydra
from kvsim.settings.sources import flags
from kvsim.settings.unused_settings import keys_of
from kvsim.shadow.ghost_plans import ghost_plans
from kvsim.shadow.metrics import MetricsServer
from kvsim.shadow.outputs import Outputs
from kvsim.shadow.recording import Recording
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.shadow import Shadow
from kvsim.shadow.sources.assembly import sources_of
from kvsim.shadow.sources.feed import Feed
from kvsim.shadow.sources.playing import play
from kvsim.shadow.sources.prompts import Prompts
from kvsim.shadow.sources.salt import Salt
from kvsim.shadow.sources.settings import SourceSettings
from kvsim.shadow.summary import numbers

SHORT = ("events", "listen", "server", "log", "page", "record")
"""Settings of ``shadow`` that need not be written with it."""
LISTS = ("events",)
PAGE = "shadow.html"
OF_BYTES = "text is cut into pages by its bytes, 4 for a token"
"""What a recording says of itself where there was no tokenizer."""


@dataclass(frozen=True)
class Watching:
    """What a command line asks for."""

    plans: dict[str, Plan]
    """The ghosts by name; the first one is as the engine is configured."""
    sources: SourceSettings
    settings: ShadowSettings
    command: str


def main(words: Sequence[str]) -> None:
    """Run the command with the words that follow its name."""
    run_application("shadow", start, [expanded(word) for word in words])


def expanded(word: str) -> str:
    """Return an override as Hydra reads it: ``events=ADDRESS,ADDRESS`` and others are short for ``shadow.events=[...]``."""
    key, _, value = word.partition("=")
    name = key.removeprefix("shadow.")
    if key not in SHORT and not (key.startswith("shadow.") and name in LISTS):
        return word
    if name in LISTS and value and not value.startswith("["):
        return f"shadow.{name}=[{','.join(map(quoted, value.split(',')))}]"
    is_plain = value in ("", "null") or value.isdecimal() or value[:1] in "'\"["
    return f"shadow.{name}={value if is_plain else quoted(value)}"


def start(asked: Asked) -> None:
    """Watch what a configuration describes. Raises UsageError."""
    check_run_here(asked)
    overrides, sources = asked.overrides, list(asked.config.hydra.runtime.config_sources)
    config, choices = without_hydra(asked.config)
    node: Any = OmegaConf.to_container(config, resolve=True)
    node = node["shadow"]
    plan = build_run(config, command=SHADOW, overrides=overrides, choices=choices)
    source_settings = construct(SourceSettings, _part(node, SourceSettings), "shadow")
    try:
        source_settings.check_given({key.removeprefix("shadow.") for key in keys_of(overrides) if key.startswith("shadow.")})
    except ValueError as error:
        raise UsageError(f"shadow.{error}") from None
    own = {"requests_from_events": not source_settings.has_own_requests}
    watching = Watching(
        ghost_plans(plan, overrides, node["ghosts"]),
        source_settings,
        construct(ShadowSettings, _part(node, ShadowSettings) | own, "shadow"),
        shlex.join(["kvsim", "shadow", *flags(sources), *overrides]),
    )
    with Lock(plan.output):
        watch(watching)


def _part(node: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return the settings of the section that a class has."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in node.items() if name in names}


def watch(watching: Watching) -> None:
    """Watch until it is stopped, and show what was found. Raises UsageError, and WrongResult if not all could be recorded."""
    asked, base = watching.sources, next(iter(watching.plans.values()))
    page_tokens = gcd(*(plan.page_tokens for plan in watching.plans.values())) if not asked.events else base.page_tokens
    with salted(asked) as salt:
        _watch(watching, page_tokens, salt)


def _watch(watching: Watching, page_tokens: int, salt: Salt) -> None:
    asked, base = watching.sources, next(iter(watching.plans.values()))
    prompts = Prompts(page_tokens, salt, asked.tokenizer)
    shadow = Shadow(watching.plans, page_tokens, replace(watching.settings, salt=salt.key(b"events").hex()))
    sources = sources_of(asked, prompts, salt, page_tokens)
    table = LiveTable(Console())
    page = Path(asked.page) if asked.page is not None else base.output / PAGE
    outputs = Outputs(shadow, prompts, table, page, watching.command, asked.every_s)
    with recording(asked, page_tokens, salt, prompts) as record, metrics(asked, outputs, table):
        feed = Feed(shadow, record, outputs.observed, outputs.refresh, every_s=asked.every_s, most=asked.requests)
        feed.say, outputs.feed, outputs.recording = table.warn, feed, record
        table.say(f"shows {page}")
        table.start()
        try:
            with seldom_collecting():
                received = play(sources, feed, table.say)
        finally:
            if feed.has_begun:
                last = outputs.end()
                base.logger.log_watched(base.output, base.begun(SHADOW), outputs.history.points(), numbers(last))
            else:
                table.close()
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        table.say(f"stopped by {received.name}")
    if feed.lost_lines:
        raise WrongResult(f"shadow.record: {feed.lost_lines:,} requests are missing from {asked.record}: {feed.first['record']}")


@contextmanager
def salted(asked: SourceSettings) -> Iterator[Salt]:
    """Have the salt during the block. A file made for it is removed if nothing was recorded with it. Raises UsageError."""
    if asked.salt_file is None or asked.record is None:
        yield Salt.random()
        return
    path, record = Path(asked.salt_file), Path(asked.record)
    is_new, before = not path.exists(), _size(record)
    salt = Salt.of_file(path)
    try:
        yield salt
    finally:
        if is_new and _size(record) == before:
            path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def recording(asked: SourceSettings, page_tokens: int, salt: Salt, prompts: Prompts) -> Iterator[Recording | None]:
    """Open the trace file during the block, if there is to be one. Raises UsageError."""
    if asked.record is None:
        yield None
        return
    path = Path(asked.record)
    record = Recording(path, page_tokens, salt, lambda: OF_BYTES * prompts.read_bytes, goes_on=asked.salt_file is not None)
    try:
        yield record
    finally:
        record.close()


@contextmanager
def metrics(asked: SourceSettings, outputs: Outputs, table: LiveTable) -> Iterator[None]:
    """Answer Prometheus during the block, if that is asked for. Raises UsageError."""
    if asked.metrics_port is None:
        yield
        return
    server = MetricsServer(asked.host, asked.metrics_port, lambda: outputs.latest)
    table.say(f"metrics on http://{asked.host}:{server.port}/metrics")
    try:
        yield
    finally:
        server.close()
