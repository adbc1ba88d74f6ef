"""The duration of an engine's steps with what it does beside the model: drafts, and LoRA adapters."""

from kvsim.engine.adapters import AdapterSettings
from kvsim.engine.speculation import Speculation
from kvsim.hardware.spec import HardwareSpec
from kvsim.substrate.simulated.adapter_steps import AdapterSteps
from kvsim.substrate.simulated.compute import Steps
from kvsim.substrate.simulated.drafted_steps import DraftedSteps


def engine_steps(
    steps: Steps, hardware: HardwareSpec, speculation: Speculation | None = None, lora: AdapterSettings | None = None
) -> Steps:
    """Return the steps of a model with what drafts and adapters add to them, if an engine has any."""
    if speculation is not None and speculation.is_on:
        steps = DraftedSteps(steps, speculation)
    if lora is not None and lora.is_on:
        steps = AdapterSteps(steps, lora, hardware)
    return steps
