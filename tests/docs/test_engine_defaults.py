"""What the page on engines' defaults says of kvsim is what kvsim builds, for every preset and every setting that it makes."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import hydra.utils
import pytest
import yaml

from kvsim.plans.build import build_run
from kvsim.plans.capacity import capacity_pages, capacity_states
from kvsim.plans.plan import Plan
from tests.docs.modules import ROOT, load

engine_defaults = load("engine_defaults")
TABLES = engine_defaults.presets()
CONF = ROOT / "conf"
FAMILIES = ("eviction", "placement", "prefetch", "checkpoint", "scheduling")
"""Groups whose choice is a policy."""
NOT_OF_AN_ENGINE = re.compile(r"(model|hardware|trace|print_tree)\b.*|rules")
"""What a preset also sets; its rules are the engine."""


@cache
def plan(name: str, command: str, *overrides: str) -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=[f"preset={name}", *overrides])
    return build_run(cfg, command=command, overrides=overrides)


def is_missing(built: Plan, setting: str) -> bool:
    """Whether kvsim's own rules stand in for the engine's and do not have a setting of these."""
    group, _, key = setting.partition(".")
    return group == "rules" and bool(built.rules_note) and not hasattr(built.rules, key)


def is_in(built: Plan, setting: str, value: Any) -> bool:
    """Whether a plan was built with this value of a setting."""
    group, _, key = setting.partition(".")
    if "@" in setting:
        family, _, place = setting.partition("@tiers.")
        return is_choice(getattr(tier(built, place.partition(".")[0]), family), family, value)
    if group == "tiers":
        return is_in_tier(built, *key.split("."), value)
    if group in ("eviction", "placement"):
        found = [getattr(one, group) for one in built.tiers if not built.config["tiers"][one.name].get(group)]
    else:
        found = [getattr(built, group)]
    return all(has(one, group, key, value) for one in found if one is not None)


def has(found: Any, group: str, key: str, value: Any) -> bool:
    """Whether a part of a plan is this choice of its group, or has this value of one of its settings."""
    if group in FAMILIES and not key:
        return is_choice(found, group, value)
    return bool((getattr(found, key) if key else found) == value)


def is_choice(policy: Any, family: str, name: str) -> bool:
    target = yaml.safe_load((CONF / family / f"{name}.yaml").read_text())["_target_"]
    return type(policy) is hydra.utils.get_class(target)


def tier(built: Plan, name: str) -> Any:
    return next(one for one in built.tiers if one.name == name)


def is_in_tier(built: Plan, name: str, key: str, value: Any) -> bool:
    """Whether a tier of a plan has this capacity, pages or place."""
    if key == "states":
        if value == "shared" or built.states is None:
            return value == "shared" and built.states is None
        states = dict(zip([one.name for one in built.tiers], built.states, strict=False))
        return states.get(name, 0) == capacity_states(value, state_bytes=built.model.state_bytes)
    if key == "capacity":
        pages = capacity_pages(value, page_tokens=built.page_tokens, page_bytes=built.model.page_bytes(built.page_tokens))
        return pages == next((one.capacity_pages for one in built.tiers if one.name == name), 0)
    if key == "page_tokens":
        return bool(tier(built, name).unit_pages * built.page_tokens == value)
    return bool(tier(built, name).above == value)


def mistakes(name: str, rows: list[Any]) -> Iterator[str]:
    """Rows whose value is not that of the plan, in a replay or in a simulation, or that are in neither."""
    for row in rows:
        compared = 0
        for command in ("replay", "simulate"):
            if row.command not in ("", command):
                continue
            built = plan(name, command, *row.is_set_with)
            if not is_missing(built, row.setting):
                compared += 1
                if not is_in(built, row.setting, row.value):
                    yield f"{command}: {row.setting} is not {row.value}"
        if not compared:
            yield f"{row.setting} applies to no command"


@pytest.mark.parametrize("name", TABLES)
def test_the_table_has_the_values_that_kvsim_builds(name: str) -> None:
    assert list(mistakes(name, TABLES[name][1])) == []


def other_value(row: Any) -> Any:
    """A value of a setting that no preset has."""
    family = row.setting.partition("@")[0]
    if family in FAMILIES:
        return next(path.stem for path in sorted((CONF / family).glob("*.yaml")) if path.stem != row.value)
    if row.setting.endswith(("capacity", "states")) and row.setting.startswith("tiers."):
        return "12345pages" if row.setting.endswith("capacity") else "777states"
    return not row.value if isinstance(row.value, bool) else row.value + 777 if isinstance(row.value, int) else "another"


@pytest.mark.parametrize("name", TABLES)
def test_another_value_would_be_found(name: str) -> None:
    for row in TABLES[name][1]:
        assert list(mistakes(name, [replace(row, value=other_value(row))])), row.setting


def set_by(path: Path) -> set[str]:
    """The settings that a preset makes, and the policies that it chooses."""
    content = yaml.safe_load(path.read_text())
    made = {key.removeprefix("override /"): value for entry in content.pop("defaults") for key, value in entry.items()}
    return {*made, *leaves(content)}


def leaves(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def rules_of(path: Path) -> str:
    """The rules that a preset chooses."""
    chosen = {key: value for entry in yaml.safe_load(path.read_text())["defaults"] for key, value in entry.items()}
    return str(chosen.get("override /rules", "default"))


RULES = {path.stem: rules_of(path) for path in sorted((CONF / "preset").glob("*.yaml"))}


def test_every_preset_of_an_engine_has_a_table() -> None:
    assert {name for name, rules in RULES.items() if rules != "default"} == set(TABLES)


@pytest.mark.parametrize("rules", sorted(set(RULES.values()) - {"default"}))
def test_every_setting_of_an_engine_s_rules_is_in_the_table_of_a_preset(rules: str) -> None:
    known = {f"rules.{key}" for key in yaml.safe_load((CONF / "rules" / f"{rules}.yaml").read_text()) if key != "_target_"}
    assert known - {row.setting for name in TABLES if RULES[name] == rules for row in TABLES[name][1]} == set()


@pytest.mark.parametrize("name", TABLES)
def test_every_setting_of_a_preset_is_in_its_table(name: str) -> None:
    made = {setting for setting in set_by(CONF / "preset" / f"{name}.yaml") if not NOT_OF_AN_ENGINE.fullmatch(setting)}
    assert made - {row.setting for row in TABLES[name][1]} == set()


@pytest.mark.parametrize("name", TABLES)
def test_a_difference_is_named_where_there_is_one(name: str) -> None:
    """Either the words are the same, or one phrase says why the choice is, or one says what differs."""
    for row in TABLES[name][1]:
        assert not (row.note and row.differs), row.setting
        assert row.is_worded_alike or row.note or row.differs, (
            f"{row.setting}: {row.value} is not {row.default}, and nothing says why"
        )


def test_a_setting_has_one_value_for_each_command() -> None:
    for name, (_, rows) in TABLES.items():
        for command in ("replay", "simulate"):
            settings = [row.setting for row in rows if row.command in ("", command)]
            assert len(settings) == len(set(settings)), (name, command)
