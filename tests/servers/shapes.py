"""The model and the machine that overrides describe, as ``overrides_of`` asks for them."""

from collections.abc import Sequence

from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.plans.build import build_shape
from kvsim.settings.configuration import compose


def shape(overrides: Sequence[str]) -> tuple[ModelSpec, HardwareSpec]:
    return build_shape(compose(overrides), overrides)
