"""MyPolicy by hand: what it answers to what it sees."""

from dataclasses import dataclass
from typing import Any

import pytest

from kvsim.commands.templates.admission.my_policy import MyPolicy


@dataclass
class Engine:
    """What the policy may know of an engine (EngineLoad); add what yours reads."""

    kv_use: float = 0.0


@dataclass
class Load:
    """What it may know when a request has come (ClusterLoad)."""

    engines: tuple[Engine, ...]


@dataclass
class Prompt:
    """What it reads of a request."""

    prompt_tokens: int


def admits(policy: MyPolicy, tokens: int, kv_use: float) -> bool:
    request: Any = Prompt(tokens)
    load: Any = Load((Engine(kv_use),))
    return policy.admits(request, load)


def test_long_prompts_are_refused_while_memory_is_short() -> None:
    assert admits(MyPolicy(long_tokens=100), 101, kv_use=0.9)
    assert not admits(MyPolicy(long_tokens=100), 101, kv_use=0.91)
    assert admits(MyPolicy(long_tokens=100), 100, kv_use=1.0)


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_use must be from 0 to 1, not 2"):
        MyPolicy(kv_use=2)
