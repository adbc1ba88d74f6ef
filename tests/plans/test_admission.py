"""What a plan must be for requests to be refused, and where that has no effect."""

import pytest

from kvsim.errors import NoEffect, UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.settings.configuration import compose_with_choices


def plan(*overrides: str, command: str = "simulate") -> Plan:
    config, choices = compose_with_choices(list(overrides))
    return build_run(config, command=command, overrides=overrides, choices=choices)


@pytest.mark.parametrize("command", ["replay", "curve", "train", "shadow", "validate"])
def test_other_commands_refuse_no_request(command: str) -> None:
    with pytest.raises(NoEffect, match=f"admission has no effect on kvsim {command}"):
        plan("admission=queue_limit", command=command)


def test_the_reason_is_said() -> None:
    with pytest.raises(NoEffect, match="kvsim replay, which has no clock: requests wait for nothing"):
        plan("admission=queue_limit", command="replay")
    with pytest.raises(NoEffect, match="kvsim validate, which compares runs of the same requests"):
        plan("admission=queue_limit", command="validate")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["admission=queue_limit", "admission.of=host"], "admission.of must be one of engine, cluster, not host"),
        (["admission=queue_limit", "admission.waiting_requests=null"], "needs a limit: set waiting_requests, prefill_tokens or"),
        (["admission=queue_limit", "admission.waiting_requests=0"], "admission.waiting_requests must be at least 1, not 0"),
        (["admission=predicted_ttft", "admission.tpot_s=1"], "admission.tpot_s has no effect with these settings"),
        (["admission=predicted_ttft", "admission.factor=0"], "admission.factor must be above 0, not 0"),
        (["admission=priority_shed", "admission.priorities=[{type: a}]"], r"priorities\[0\] must have type and priority"),
        (
            ["admission=priority_shed", "admission.priorities=[{type: a, priority: -1}, {type: a, priority: 0}]"],
            "priorities has a type twice",
        ),
        (["substrate=hardware", "model=tiny", "admission=queue_limit"], "admission: real GPUs take every request"),
        (
            ["cluster.engines=2", "cluster.workers=2", "routing=session_affinity", "cluster.engines_per_host=1",
             "admission=queue_limit", "admission.of=cluster"],
            "cluster.workers: QueueLimit refuses requests by the load of all engines",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*overrides)
