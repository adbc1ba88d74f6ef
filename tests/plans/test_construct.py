"""Shapes of settings are checked by the annotations of a class, also by those that a compiled class has."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvsim.errors import UsageError
from kvsim.plans.construct import construct


@dataclass(kw_only=True)
class Whole:
    steps: list[list[int]] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Compiled:
    """Of a compiled class, annotations say no more than this."""

    steps: list = field(default_factory=list)  # type: ignore[type-arg]
    names: dict = field(default_factory=dict)  # type: ignore[type-arg]


@pytest.mark.parametrize("kind", [Whole, Compiled])
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"steps": "abc"}, r"own.steps must be a list, \[...\], not 'abc'"),
        ({"names": [1]}, r"own.names must be a mapping, \{name: value, ...\}, not \[1\]"),
    ],
)
def test_what_is_no_list_or_no_mapping_is_named(kind: type, given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        construct(kind, given, "own")
    assert construct(kind, {"steps": [[1, 2]], "names": {"a": 1}}, "own").steps == [[1, 2]]
