"""MyPolicy by hand, in pages."""

import pytest

from kvsim.commands.templates.checkpoint.my_policy import MyPolicy
from kvsim.policies.checkpoint.base import Prefill


def test_states_are_saved_at_the_branch_and_at_the_end() -> None:
    assert list(MyPolicy().after_prefill(Prefill(start=2, known=5, full=9, replay=8))) == [5, 9]


def test_a_short_prefill_saves_none() -> None:
    assert list(MyPolicy(min_pages=8).after_prefill(Prefill(start=2, known=5, full=9, replay=8))) == []


def test_a_setting_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="min_pages must be at least 1, not 0"):
        MyPolicy(min_pages=0)
