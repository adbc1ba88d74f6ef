"""What can be set: groups with their choices, settings with their defaults and comments. Read from the YAML files, without Hydra.

For help, completion and the reference; what a run uses is composed by Hydra.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvsim.errors import UsageError
from kvsim.settings.sources import KVSIM, files_of
from kvsim.suggest import closest

GROUPS = {
    "trace": "the requests: a file format with its settings, or a generator",
    "model": "bytes of KV and weights, FLOPs",
    "hardware": "rates of the GPU, the host link and the disk",
    "drive": "a drive for the disk tier, in place of the machine's",
    "network": "a network card between engines and to the remote store, in place of the machine's links",
    "engine": "batching and scheduling of the serving engine",
    "rules": "where engines differ in what can be a hit",
    "eviction": "which pages leave a tier first",
    "placement": "when a tier receives a copy from the tier above it",
    "prefetch": "what is read from disk while a request waits, and what pages do during tool calls",
    "checkpoint": "where the recurrent state of a hybrid model is saved; without a choice, where vLLM keeps one (retention)",
    "routing": "which engine of a cluster gets a request",
    "scheduling": "which waiting request is admitted next",
    "autoscaling": "how many engines of a cluster serve",
    "admission": "which requests are served at all",
    "logger": "where results go besides the run's folder",
    "preset": "policies, rules and sizes that together are a known engine or setup",
}
"""Every group of ``conf`` and what it chooses."""
FAMILIES = ("eviction", "prefetch", "placement", "checkpoint", "routing", "scheduling", "autoscaling", "admission")
"""Those of policies."""
OVER_OTHERS = ("preset", "drive", "network")
"""Groups that a run can do without: a choice sets settings of others."""
OF_CALIBRATE = ("model", "hardware")
"""Those of ``kvsim calibrate``."""
DEFAULT = re.compile(r"^  - (?P<group>[\w@.]+): (?P<choice>\w+)$", re.MULTILINE)
CHOICES = re.compile(r"\w+(?:,\w+)*")
NAMED = re.compile(r"(?:^|(?<=\. )|(?<=; ))([a-z][a-z0-9_]*): ")
SOURCE = re.compile(r"(?:^|\s)Source: (?P<document>.+?)\. Date: (?P<date>\d{4}(?:-\d\d)?)\.")
SENTENCE = re.compile(r"(?<=[a-z0-9)\"'%])[.:] (?=[A-Z])")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A key of a YAML file with its value as written, and the comment above it. A section has no value."""

    key: str
    value: str | None
    comment: str


def read_settings(text: str) -> list[Setting]:
    """The keys of a YAML file in order, ``_target_`` and lists of ``defaults`` included."""
    settings: list[Setting] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    rows = 0
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped[1:].removeprefix(" "))
            continue
        if stripped.startswith("- ") and settings:
            rows += 1
            settings[-1] = _with_rows(settings[-1], stripped[2:], rows)
        elif stripped:
            indent = len(line) - len(line.lstrip())
            key, _, value = stripped.partition(":")
            path = [*((at, name) for at, name in path if at < indent), (indent, key)]
            dotted = ".".join(name for _, name in path)
            settings.append(Setting(key=dotted, value=value.strip() or None, comment="\n".join(comment)))
            rows = 0
        comment = []
    return settings


def _with_rows(setting: Setting, row: str, rows: int) -> Setting:
    """A setting whose value is a list, after one more row of it."""
    if row.startswith(("[", '"')):
        value = f"{rows} rows" if rows > 1 else "1 row"
    else:
        value = f"{setting.value}, {row}" if setting.value else row
    return replace(setting, value=value)


def choices(group: str) -> dict[str, Path]:
    """The file of each choice of a group, the user's own first. Raises UsageError for a name used twice."""
    return files_of(group)


def check_choices(overrides: Iterable[str]) -> None:
    """Raise UsageError for a choice that a group does not have: sooner than Hydra could, which has to be loaded first."""
    overrides = list(overrides)
    if any("hydra.searchpath" in override for override in overrides):
        return  # has choices that are not known here
    for override in overrides:
        name, is_given, value = override.lstrip("+").partition("=")
        group = name.partition("@")[0]
        if not is_given or group not in GROUPS or not CHOICES.fullmatch(value):
            continue
        options = choices(group)
        for choice in value.split(","):
            if choice != "null" and choice not in options:
                raise UsageError(unknown_choice(group, choice, sorted(options)))


def unknown_choice(group: str, choice: str, options: Sequence[str]) -> str:
    """The line about a choice that a group does not have, with a suggestion."""
    return f"{group}={choice}: there is no such choice{closest(choice, options) or ';'} choose from {', '.join(options)}"


def read_choice(path: Path) -> tuple[str, list[Setting]]:
    """What the file of a choice says of itself, and its settings: first ``_target_``, or of a preset ``defaults``.

    Raises UsageError for a file that is no text.
    """
    try:
        settings = read_settings(path.read_text().removeprefix("# @package _global_\n"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a YAML file: {error.reason}") from error
    return (settings[0].comment if settings else ""), settings


def defaults() -> dict[str, str]:
    """The choice from each group that a run makes by itself, by group or ``group@tier``; ``null`` for none."""
    return {found["group"]: found["choice"] for found in DEFAULT.finditer((KVSIM / "config.yaml").read_text())}


def run_settings(config_name: str = "config") -> list[Setting]:
    """The settings of a run that belong to no group, sections included."""
    settings = read_settings((KVSIM / f"{config_name}.yaml").read_text())
    return [setting for setting in settings if setting.key.split(".")[0] not in ("defaults", "hydra")]


def chosen(overrides: Iterable[str]) -> dict[str, str]:
    """The choice from each group and for each tier after overrides, without those that nothing is chosen from."""
    found = defaults()
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if name.split("@")[0] in GROUPS:
            found[name] = value.split(",")[0]
    return {name: choice for name, choice in found.items() if choice not in ("null", "")}


def settings_of(name: str, choice: str) -> list[Setting]:
    """The settings of a choice with their full keys; ``name`` is a group or ``group@tier``. Empty for an unknown choice, and for
    one of ``OVER_OTHERS``, which has no settings of its own."""
    group, _, package = name.partition("@")
    path = choices(group).get(choice) if group in GROUPS and group not in OVER_OTHERS else None
    found = read_choice(path)[1] if path else []
    return [replace(setting, key=f"{package or group}.{setting.key}") for setting in found if setting.key != "_target_"]


def all_settings(overrides: Iterable[str] = (), config_name: str = "config") -> list[Setting]:
    """Every setting of a run with these overrides, the sections left out."""
    own = [setting for name, choice in chosen(overrides).items() for setting in settings_of(name, choice)]
    return [setting for setting in (*run_settings(config_name), *own) if setting.value is not None]


def first_sentence(text: str) -> str:
    """The first sentence of a comment, on one line, without its full stop."""
    return SENTENCE.split(" ".join(text.split()), maxsplit=1)[0].rstrip(".")


def source_of(comment: str) -> str:
    """The document that a machine's rates are from, with its date, as its comment says; empty if it does not."""
    found = SOURCE.search(" ".join(comment.split()))
    return f"{found['document']}, {found['date']}" if found else ""


def named_values(comment: str) -> list[str]:
    """The values that a comment explains as ``value: meaning``."""
    return NAMED.findall(" ".join(comment.split()))
