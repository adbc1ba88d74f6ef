"""Values that are no number of a setting, in every setting that is a number: one line that names it, or a good result."""

import json
import signal
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from math import inf, nan
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import hydra.utils
import pytest
from omegaconf import DictConfig, OmegaConf

from kvsim.core.rules import Rules
from kvsim.emulation.settings import ServeSettings
from kvsim.engine.engine import EngineSettings
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSource
from kvsim.plans.arguments import FAMILIES
from kvsim.plans.build import build_run
from kvsim.plans.command_settings import PlanSettings
from kvsim.plans.construct import construct
from kvsim.run.curves import curve_settings
from kvsim.run.execute import draw, execute
from kvsim.servers.settings import ServerSettings
from kvsim.settings.catalog import choices
from kvsim.settings.configuration import compose
from kvsim.shadow.settings import ShadowSettings
from kvsim.shadow.sources.settings import SourceSettings
from kvsim.sweeps.contestants import LeaderboardSettings
from kvsim.trace.base import TraceSource
from kvsim.training.settings import TrainSettings

KINDS: dict[str, type] = {
    "trace": TraceSource,
    "model": ModelSource,
    "hardware": HardwareSpec,
    "engine": EngineSettings,
    "rules": Rules,
    **FAMILIES,
}
NO_NUMBERS = (nan, 10**60, True)
"""What no setting is that is a number."""
MORE = (inf, -inf, -1, 0, "abc", 2**63, 10**30, 10**400, 0.5, 1e-30, 1e49)
"""What some settings are and others are not."""
OF_COMMANDS = {"replay": "replay", "curve": "curve"}
"""The command that reads a section of the configuration, unless it is simulate."""
OF_SERVERS: dict[str, tuple[dict[str, Any], tuple[type, ...]]] = {
    "server": ({"url": "http://localhost"}, (ServerSettings,)),
    "serve": ({}, (ServeSettings,)),
    "plan": ({}, (PlanSettings,)),
    "leaderboard": ({}, (LeaderboardSettings,)),
    "train": ({}, (TrainSettings,)),
    "shadow": ({"log": "log.jsonl"}, (SourceSettings, ShadowSettings)),
}
"""Sections that are read before anything runs, with what must be set there, and the classes that share their settings."""
OF_RUNS = ("cluster", "replay", "curve", "slo", "saturate", "sweep", "disk")
"""Sections with settings that are null."""
TEXTS = (("disk", "folder"), ("sweep", "objective"))
"""Those of them that are no numbers."""
UNREAD = (
    "hf",
    "weka",
    "lmcache",
    "dynamo",
    "openai",
    "sharegpt",
    "proxy_log",
    "spans",
    "aiperf_inputs",
    "dag",
    "lcp",
    "freeinference",
    "tracelab",
)
"""Choices that read a file which is not made here; their settings are checked without it."""
LONGEST_S = 30
"""A run with an extreme setting that takes longer is one that never ends."""

THREE_TIERS = ("tiers.cpu.capacity=3000pages", "tiers.disk.capacity=6000pages")
TOLD = ("trace=mooncake", "trace.path=mooncake.jsonl", "page_tokens=512", "tiers.gpu.capacity=4pages")
"""A trace that tells of each request all that a policy may need."""
HYBRID = ("model=marconi_7b", "tiers.gpu.capacity=1000pages")
AROUND: dict[str, tuple[str, tuple[str, ...]]] = {
    "": ("simulate", ("tiers.gpu.capacity=auto",)),
    "hardware": ("simulate", (*THREE_TIERS, "prefetch=threshold")),
    "model": ("simulate", ("hardware.gpus=16", "tiers.cpu.capacity=3000pages")),
    "model=tiny": ("simulate", ("hardware.gpus=2", "tiers.cpu.capacity=3000pages")),
    "checkpoint": ("replay", HYBRID),
    "eviction": ("replay", (*TOLD, "tiers.cpu.capacity=4pages")),
    "placement": ("replay", THREE_TIERS),
    "prefetch": ("simulate", THREE_TIERS),
    "routing": ("simulate", ("cluster.engines=2",)),
    "scheduling": ("simulate", TOLD),
    "autoscaling": ("simulate", ("cluster.engines=4",)),
    "admission": ("simulate", ("slo.ttft_s=1",)),
    "admission=priority_shed": ("simulate", ("admission.priorities=[{type: chat, priority: -1}]",)),
    "rules": ("replay", ("tiers.cpu.capacity=3000pages",)),
    "rules=vllm": ("simulate", ("tiers.cpu.capacity=3000pages", "placement=store_threshold")),
    "rules=vllm_window": ("replay", ("model=gpt_oss_20b", "tiers.gpu.capacity=4000pages")),
    "rules=vllm_hybrid": ("replay", (*HYBRID, "checkpoint=retention")),
}
"""The command that tries the choices of a group, and the settings that the choice needs to have an effect."""

Place = tuple[str | int, ...]


def numbers_in(node: Any, hints: dict[str, Any] | None = None, place: Place = ()) -> Iterator[Place]:
    """The places of the numbers in a node, and of what is null and may be a number by the type ``hints`` of its class.

    Rows of a table are alike: the first one stands for all.
    """
    for name, value in node.items() if isinstance(node, dict) else enumerate(node[:1]):
        if isinstance(value, dict | list):
            yield from numbers_in(value, None, (*place, name))
        elif value is None and hints:
            if {int, float} & set(getattr(hints.get(name), "__args__", ())):
                yield (*place, name)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*place, name)


def changed(node: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    """The node with another value at a place."""
    node = deepcopy(node)
    within: Any = node
    for name in place[:-1]:
        within = within[name]
    within[place[-1]] = value
    return node


def name_of(place: Place) -> str:
    """The name that an error has: that of the setting, or of the table with the number."""
    return next(name for name in reversed(place) if isinstance(name, str))


def node_of(group: str, choice: str) -> dict[str, Any]:
    """The settings of a choice, those that it leaves open or takes from others filled in."""
    text = choices(group)[choice].read_text().replace("${seed}", "0").replace("???", "[ab]" if choice == "words" else "x")
    node: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(text), resolve=True)  # type: ignore[assignment]
    return node


def places_of(group: str, choice: str) -> list[Place]:
    node = node_of(group, choice)
    target = node.get("_target_")
    return [*numbers_in(node, get_type_hints(hydra.utils.get_class(target) if target else KINDS[group]))]


def refused(group: str, choice: str) -> int:
    """Try what is no number at every place of a choice; return the number of refusals."""
    node, tried = node_of(group, choice), 0
    for place in places_of(group, choice):
        for value in NO_NUMBERS:
            with pytest.raises(UsageError) as error:
                construct(KINDS[group], changed(node, place, value), group)
            assert name_of(place) in str(error.value) and "\n" not in str(error.value), (place, value)
            tried += 1
    return tried


@pytest.mark.parametrize("group", KINDS)
def test_choices_refuse_what_is_no_number(group: str) -> None:
    alike = {"model": ["llama3_8b", "hf"], "hardware": ["h200", "linear"], "trace": [*choices("trace").keys() - {"auto"}]}
    assert sum(refused(group, choice) for choice in alike.get(group, choices(group)))


def around(group: str, choice: str) -> tuple[str, tuple[str, ...]]:
    """The command that tries a choice, and the settings that it needs."""
    return AROUND.get(f"{group}={choice}") or AROUND.get(group) or ("simulate", ())


def tiny_traces() -> dict[str, tuple[str, ...]]:
    """The settings that read a tiny trace of each format, which is written to the working directory."""
    blocks = [
        {"timestamp": 1000 * at, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2 + at % 2], "session_id": at % 2,
         "type": "text", "tenant": f"team {at % 2}", "priority": at % 2, "retention": [[0, 512, 80, 30_000]]} for at in range(4)
    ]  # fmt: skip
    turns = [
        {"chat_id": at, "parent_chat_id": -1, "timestamp": at, "input_length": 40, "output_length": 10, "type": "text", "turn": 1,
         "hash_ids": [0, 1, 2 + at % 2]} for at in range(4)
    ]  # fmt: skip
    tokens = [{"timestamp": 1000 * at, "token_ids": [*range(64), at % 2], "output_length": 10} for at in range(4)]
    rows = [{"timestamp": 1000 * at, "input_length": 4000, "output_length": 10} for at in range(4)]
    for name, lines in (("mooncake", blocks), ("bailian", turns), ("tokens", tokens), ("lengths", rows)):
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = {name: (f"trace.path={name}.jsonl",) for name in ("bailian", "tokens")}
    return files | {
        "mooncake": TOLD[1:],
        "auto": TOLD[1:],
        "lengths": ("trace.path=lengths.jsonl", "trace.prefixes=0.5"),
        "words": ("trace.prompts=[a b c d, a b e f]", "page_tokens=2"),
        "synthetic": (),
    }


def composed(group: str, choice: str) -> DictConfig:
    """The configuration that a choice is tried in: a tiny trace, small tiers."""
    traces = tiny_traces()
    overrides = ["tiers.gpu.capacity=2000pages", "output=out", *around(group, choice)[1]]
    if group == "trace":
        overrides += traces[choice]
    if "trace=mooncake" not in overrides and (group != "trace" or choice == "synthetic"):
        overrides += ["trace.sessions=3", "trace.limit=6", "trace.max_prompt_tokens=12000"]
    if group == "model" and choice != "tiny" and OmegaConf.load(choices("model")[choice]).get("recurrent_layers"):
        overrides += ["checkpoint=last"]
    return compose([*overrides, *([f"{group}={choice}"] if group else [])])


def tried(command: str, config: DictConfig, place: Place, value: Any) -> str:
    """Run with another value at a place; return "ran", or the error, which has one line and names the setting.

    A value that the setting may have can contradict another setting of its class, or make a trace too long for any clock; the
    error says so then.
    """
    config = config.copy()
    name = name_of(place)
    within: Any = config
    try:
        for part in place[:-1]:
            within = within[part]
        within[place[-1]] = value
        if place[0] in OF_SERVERS:
            node: Any = OmegaConf.to_container(config[place[0]], resolve=True)
            given, kinds = OF_SERVERS[str(place[0])]
            for kind in kinds:
                own = {setting.name for setting in fields(kind)}
                construct(kind, {key: value for key, value in (node | given).items() if key in own}, str(place[0]))
            return "ran"
        plan = build_run(config, command=command)
        if command == "curve":
            draw(plan, curve_settings(OmegaConf.to_container(config.curve)))
        elif command in ("replay", "simulate"):
            execute(command, plan).write("out")
            result = json.loads(Path("out/result.json").read_text(), parse_constant=pytest.fail)
            assert result["requests"] > 0
    except UsageError as error:
        said = str(error)
    else:
        said = "ran"
    shared = said.startswith((f"{place[0]}", "a request arrives"))
    assert said == "ran" or "\n" not in said and (name in said or shared and value not in NO_NUMBERS), (place, value, said)
    return said


@pytest.fixture
def _within_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in an empty folder; one that goes on for ``LONGEST_S`` after it has set the alarm fails."""

    def too_long(number: int, frame: FrameType | None) -> None:
        pytest.fail("the run does not end")

    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def places_of_runs() -> list[Place]:
    """The numbers and sizes of the configuration that belong to no group, and what is null."""
    node: Any = OmegaConf.to_container(compose([]), resolve=True)
    leaves = numbers_in({name: value for name, value in node.items() if name not in KINDS})
    sizes = [("tiers", tier, "capacity") for tier in node["tiers"]] + [("tiers", "gpu", "workspace")]
    nulls = [(section, name) for section in OF_RUNS for name, value in node[section].items() if value is None]
    return [*leaves, *sizes, *(place for place in nulls if place not in TEXTS)]


@pytest.mark.usefixtures("_within_time")
def test_settings_of_runs_refuse_what_is_no_number() -> None:
    config = composed("", "")
    for place in places_of_runs():
        for value in NO_NUMBERS:
            assert tried(OF_COMMANDS.get(str(place[0]), "simulate"), config, place, value) != "ran", (place, value)


@pytest.mark.long  # hundreds of runs
@pytest.mark.usefixtures("_within_time")
def test_a_run_with_an_extreme_setting_ends_well_or_with_one_line() -> None:
    config = composed("", "")
    for place in places_of_runs():
        for value in MORE:
            signal.alarm(LONGEST_S)
            tried(OF_COMMANDS.get(str(place[0]), "simulate"), config, place, value)


CHOICES = [(group, choice) for group in KINDS for choice in choices(group) if places_of(group, choice)]


@pytest.mark.long  # thousands of runs
@pytest.mark.usefixtures("_within_time")
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_a_run_with_an_extreme_choice_ends_well_or_with_one_line(group: str, choice: str) -> None:
    if choice in UNREAD:
        assert refused(group, choice)
        return
    config, command = composed(group, choice), around(group, choice)[0]
    assert tried(command, config, ("seed",), 1) == "ran"
    for place in places_of(group, choice):
        for value in (*NO_NUMBERS, *MORE):
            signal.alarm(LONGEST_S)
            said = tried(command, config, (group, *place), value)
            assert said != "ran" or value not in NO_NUMBERS
