"""What an autoscaling policy sees, in figures that a test gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf

from kvsim.plans.construct import construct
from kvsim.policies.autoscaling.base import AutoscalingPolicy

FOLDER = files("kvsim.conf") / "autoscaling"
NAMES = sorted(path.name.removesuffix(".yaml") for path in FOLDER.iterdir() if path.name.endswith(".yaml"))


def policy_of(name: str, **settings: Any) -> AutoscalingPolicy:
    """A policy with the defaults of its YAML, but for these settings."""
    node = OmegaConf.to_container(OmegaConf.create((FOLDER / f"{name}.yaml").read_text()))
    assert isinstance(node, dict)
    return construct(AutoscalingPolicy, {**node, **settings}, "autoscaling")


@dataclass(kw_only=True)
class Seen:
    """The ``ClusterStatus`` of a question."""

    now: float = 15.0
    interval_s: float = 15.0
    up: int = 2
    starting: int = 0
    draining: int = 0
    least_engines: int = 1
    most_engines: int = 100
    waiting_requests: int = 0
    running_requests: int = 0
    kv_use: float = 0.0
    mean_requests: float = 0.0
    arrived_requests: int = 0
    arrived_tokens: int = 0
    begun_tokens: int = 0
    hit_tokens: int = 0
    ended_requests: int = 0
    ended_tokens: int = 0
    ttft_s: Sequence[float] = ()
    tpot_s: Sequence[float] = ()


def answers(policy: AutoscalingPolicy, seen: Sequence[dict[str, Any]], *, up: int = 1, every_s: float = 15.0) -> list[int]:
    """What a policy answers to what it sees at one question after another; engines come and go at once."""
    found = []
    for number, fields in enumerate(seen, start=1):
        status: Any = Seen(**{"now": number * every_s, "interval_s": every_s, "up": up, **fields})
        up = min(max(policy.engines(status), status.least_engines), status.most_engines) - status.starting
        found.append(up + status.starting)
    return found
