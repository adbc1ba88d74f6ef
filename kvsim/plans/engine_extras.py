"""Where what an engine does beside the model, drafts and LoRA adapters, is simulated, and what has no effect without it."""

from collections.abc import Callable
from typing import NamedTuple

from kvsim.errors import NoEffect, UsageError
from kvsim.plans.plan import Plan
from kvsim.settings.unused_settings import given


class Extra(NamedTuple):
    """What an engine may do beside the model."""

    section: str
    """Its settings are below this one."""
    switch: str
    """The setting that turns it on; 0: off."""
    things: str
    without: str
    """What there is none of while it is off."""
    is_on: Callable[[Plan], bool]
    others: tuple[str, ...]
    """Its settings that have no effect while it is off."""


DRAFTS = Extra(
    "engine.speculation",
    "tokens",
    "drafts",
    "a draft",
    lambda plan: plan.engine.speculation.is_on,
    ("acceptance", "draft_cost", "seed"),
)
ADAPTERS = Extra(
    "engine.lora",
    "max_loras",
    "adapters",
    "places for adapters",
    lambda plan: plan.engine.lora.is_on,
    ("adapter_bytes", "step_overhead_s"),
)
BOTH = (DRAFTS, ADAPTERS)


class Limit(NamedTuple):
    """Something that extras are not simulated with."""

    extras: tuple[Extra, ...]
    what: str
    """With ``{engine}`` for the engine of the plan's rules."""
    is_there: Callable[[Plan], bool]


LIMITS = (
    Limit((DRAFTS,), "recurrent layers, whose states would have to go back", lambda plan: plan.model.is_hybrid),
    Limit((ADAPTERS,), "prefill and decode apart", lambda plan: bool(plan.layout.pairs)),
    Limit(BOTH, "the schedule of {engine}'s own rules", lambda plan: plan.rules.scheduler() is not None),
    Limit((DRAFTS,), "the sliding windows of {engine}'s rules", lambda plan: plan.rules.serves_windows),
    Limit(BOTH, "several stages (hardware.pipeline_parallel)", lambda plan: plan.hardware.pipeline_parallel > 1),
    Limit((DRAFTS,), "substrate=hardware, whose model has no draft", lambda plan: plan.substrate == "hardware"),
    Limit((ADAPTERS,), "substrate=hardware, whose model has none", lambda plan: plan.substrate == "hardware"),
)


def check_extras(plan: Plan, keys: set[str]) -> None:
    """Raise UsageError for drafts and adapters where they are not simulated, and for their settings without any."""
    for extra in BOTH:
        switch = f"{extra.section}.{extra.switch}"
        if not extra.is_on(plan):
            for name in extra.others:
                if key := given(keys, f"{extra.section}.{name}"):
                    raise NoEffect(key, f"without {extra.without}", f"set {switch}")
            continue
        for limit in LIMITS:
            if extra in limit.extras and limit.is_there(plan):
                what = limit.what.format(engine=plan.rules.engine)
                raise UsageError(f"{extra.section}: {extra.things} are not simulated with {what}: set {switch}=0")
