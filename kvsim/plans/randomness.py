"""What in a run depends on its seed."""

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from kvsim.installation import source_of
from kvsim.plans.plan import Plan

GENERATOR = b".rng"
"""How a policy reads the generator of its context, its only source of randomness."""


def depends_on_seed(plan: Plan, other: Plan) -> bool:
    """Return whether the results of ``plan`` can differ from those of ``other``, the same plan with another seed.

    They can if settings follow the seed (``trace.seed=${seed}`` of a generated trace), if samples of the trace are drawn, if a
    policy's source reads its generator, if the machine has noise or the ranks of an engine are unequal by chance, and on
    hardware, where every run measures anew.
    """
    if _without_seed(plan) != _without_seed(other) or plan.substrate == "hardware" or plan.sampling:
        return True
    varies = bool(plan.hardware.rank_jitter or plan.hardware.rank_faults or plan.hardware.noise)
    return varies or any(_reads_generator(kind) for policy in _policies(plan) for kind in type(policy).__mro__)


def _without_seed(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan.config.items() if name != "seed"}


def _policies(plan: Plan) -> Iterator[object]:
    for tier in plan.tiers:
        yield from (tier.eviction, tier.placement)
    yield from (plan.prefetch, plan.checkpoint, plan.scheduling, plan.admission)
    if plan.layout.engines > 1:
        yield from (plan.routing, plan.decode_routing, plan.autoscaling)


@cache
def _reads_generator(kind: type) -> bool:
    """Return whether the source of a class's module reads a generator; True for a module without a readable source."""
    if kind.__module__ in sys.builtin_module_names or kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        return False
    source = source_of(kind.__module__)
    return not source.is_file() or GENERATOR in source.read_bytes()
