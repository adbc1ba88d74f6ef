"""Settings that came after a run was recorded."""

import pytest

from kvsim.errors import UsageError
from kvsim.report.validation.validation import check_same
from kvsim.settings.earlier import with_later_settings
from tests.report.validation.test_validation import HITS, run

TIMES_S = [1.0, 2.0, 3.0, 4.0]


def test_what_a_recorded_run_lacks_is_at_its_default() -> None:
    recorded = {"page_tokens": 16, "cluster": {"engines": 4}, "slo": {"ttft_s": 2.0}}
    later = {
        "page_tokens": 32, "sample": "5%", "cluster": {"engines": 2, "min_engines": 2},
        "slo": {"ttft_s": None, "classes": ["fast"]},
        "admission": {"_target_": "kvsim.policies.admission.queue_limit.QueueLimit"},
    }  # fmt: skip
    assert with_later_settings(recorded, {}, later) == {
        "page_tokens": 16, "sample": None, "cluster": {"engines": 4, "min_engines": 1},
        "slo": {"ttft_s": 2.0, "classes": []}, "admission": {"_target_": "kvsim.policies.admission.none.NoAdmission"},
    }  # fmt: skip


def test_a_policys_later_parameter_is_at_the_default_of_the_policy_that_ran() -> None:
    recorded = {"eviction": {"_target_": "kvsim.policies.eviction.lru_k.LRUK"}}
    later = {"eviction": recorded["eviction"] | {"k": 5}}
    assert with_later_settings(recorded, {"eviction": "lru_k"}, later) == {"eviction": recorded["eviction"] | {"k": 2}}
    # The default policy is another, so that nothing is known of a policy whose choice is unknown here.
    assert with_later_settings(recorded, {"eviction": "gone"}, later) == recorded


def test_nothing_is_composed_for_a_run_that_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsim.settings.earlier.compose", lambda overrides: pytest.fail("composed"))
    config = {"page_tokens": 16, "cluster": {"engines": 4}}
    assert with_later_settings(config, {}, {"cluster": {"engines": 2}}) == config


def test_a_recording_of_an_earlier_version_is_compared_unless_a_later_setting_is_not_at_its_default() -> None:
    earlier = run(HITS, TIMES_S, 1000, substrate="hardware")
    later = run(HITS, TIMES_S, 1000)
    later.record["config"]["sample_draws"] = 8
    check_same(later, earlier)
    later.record["config"]["sample_draws"] = 9
    with pytest.raises(UsageError, match="the two runs differ in sample_draws: only"):
        check_same(later, earlier)
