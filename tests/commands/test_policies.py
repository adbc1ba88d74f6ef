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


def test_one_family_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "eviction"]) == 0
    shown = capsys.readouterr().out
    assert "eviction=NAME" in shown and "prefetch=NAME" not in shown


def test_a_policy_is_described_with_its_algorithm_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["policies", "eviction", "slru"])
    shown = capsys.readouterr().out
    assert "LRU in two classes" in shown and "leave first" in shown
    assert "eviction.protected_hits=2\n    Uses after which a page is protected." in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["evicton"], "there is no policy family 'evicton'; did you mean eviction?"),
        (["eviction", "slur"], "eviction=slur: there is no such choice; did you mean slru? choose from "),
        (["eviction", "slru", "x"], "use kvsim policies, kvsim policies FAMILY or kvsim policies FAMILY NAME"),
    ],
)
def test_a_wrong_argument_ends_with_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: {expected}")
