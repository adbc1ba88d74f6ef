"""``kvsim serve``: answers over HTTP as an engine does, without a GPU."""

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvsim.commands.application import run_application
from kvsim.errors import UsageError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from kvsim.emulation.services import Ready
    from kvsim.plans.plan import Plan
    from kvsim.settings.configuration import Asked


NO_TRACE = "kvsim.trace.synthetic.Synthetic"
"""Stands for the trace, which clients bring."""


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("serve", start, arguments)


def start(asked: "Asked") -> None:
    """Serve what a configuration describes until SIGTERM or Ctrl-C. Raises UsageError, and KeyboardInterrupt after Ctrl-C."""
    from kvsim.emulation.apis.table import api_of
    from kvsim.emulation.services import Stop, build_apis, serve
    from kvsim.emulation.settings import ServeSettings
    from kvsim.plans.construct import construct
    from kvsim.settings.configuration import check_run_here, without_hydra

    check_run_here(asked)
    overrides = asked.overrides
    config, choices = without_hydra(asked.config)
    settings = construct(ServeSettings, dict(config.serve), "serve")
    plan, engines = plan_of_one(overrides, config, choices)
    api = settings.api or api_of(str(choices["rules"]))
    apis = build_apis(plan, engines, api, settings)

    async def served() -> tuple[str, signal.Signals]:
        stop = Stop()
        outcome = await serve(apis, settings, lambda ready: print(line_of(ready), flush=True), stop)
        return outcome, stop.signals[0]

    outcome, received = asyncio.run(served())
    if received == signal.SIGINT:
        raise KeyboardInterrupt(f": {outcome}")
    print(f"stopped by {received.name}: {outcome}", flush=True)


def plan_of_one(overrides: Sequence[str], config: "DictConfig", choices: dict[str, str]) -> "tuple[Plan, int]":
    """Return the plan of one engine, and how many engines there are. Raises UsageError for what they would share."""
    from kvsim.plans.build import build_run

    config.trace, choices["trace"] = {"_target_": NO_TRACE}, "synthetic"  # a preset's would be read
    engines = config.cluster.engines
    plan = build_run(config, command="serve", overrides=overrides, choices=choices)
    if plan.cluster.engines == 1:
        return plan, 1
    if len(plan.tiers) > 1:
        check_apart(plan)
    config.cluster.engines, config.cluster.engines_per_host = 1, None
    own = [override for override in overrides if not override.startswith(("cluster.engines=", "cluster.engines_per_host="))]
    return build_run(config, command="serve", overrides=own, choices=choices), engines


def check_apart(plan: "Plan") -> None:
    """Raise UsageError for engines that share a tier below their GPUs: served ones are independent of each other."""
    shared = [f"tiers.{tier.name}" for tier in plan.tiers if tier.scope == "cluster"]
    if shared:
        raise UsageError(
            f"{shared[0]}: all hosts share it, but served engines are independent: leave it out, or set cluster.engines=1"
        )
    if plan.cluster.per_host > 1:
        raise UsageError(
            f"cluster.engines: {plan.cluster.per_host} engines of a host share what it has below their GPUs, but served engines "
            "are independent: set cluster.engines_per_host=1, so that each has a host of its own"
        )


def line_of(ready: "Ready") -> str:
    """Return the line that tells of a server that is up."""
    api, plan = ready.api, ready.api.emulator.plan
    tiers = ", ".join(f"{tier.name} {_pages(tier.capacity_pages)}" for tier in plan.tiers)
    speed = "" if api.emulator.speed == 1 else f"; {api.emulator.speed:g} times as fast as real time"
    events = "" if ready.events is None else f"; events at {ready.events}"
    replay = "" if ready.replay is None else f", replays at {ready.replay}"
    what = f"{api.settings.model} behind {api.engine}'s interface; {tiers} of {plan.page_tokens} tokens"
    return f"{ready.address}: {what}{speed}{events}{replay}"


def _pages(capacity: int | None) -> str:
    return "unlimited pages" if capacity is None else f"{capacity} pages"
