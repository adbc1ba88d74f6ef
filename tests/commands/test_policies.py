"""``kvsim policies``."""

from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.commands.policies import FAMILIES, policies

CONF = Path(__file__).resolve().parent.parent.parent / "conf"


def test_every_yaml_is_listed_with_a_purpose() -> None:
    for family in FAMILIES:
        listed = list(policies(family))
        assert [name for name, _, _ in listed] == sorted(path.stem for path in (CONF / family).glob("*.yaml"))
        assert all(purpose for _, purpose, _ in listed)


def test_settings_are_listed_with_their_defaults() -> None:
    assert {name: settings for name, _, settings in policies("eviction")}["lru_k"] == "k=2"


def test_all_families_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{family}=NAME" in shown for family in FAMILIES)


def test_it_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "eviction"]) == 2
    assert capsys.readouterr().err == "kvsim: policies takes no arguments, but got 'eviction'\n"
