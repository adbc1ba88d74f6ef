"""Every preset can be served: requests end, are counted, and leave nothing behind."""

from pathlib import Path

import pytest

import kvsim
from kvsim.emulation.apis.base import ApiSettings
from kvsim.emulation.apis.table import APIS, api_of
from kvsim.emulation.emulator import Emulator
from kvsim.emulation.metrics.memory import memory_of
from tests.emulation.driven import after_requests
from tests.servers.emulated import plan_of

PRESETS = sorted(
    path.stem for path in (Path(kvsim.__file__).parent / "conf" / "preset").glob("*.yaml") if path.stem != "radix_tutorial"
)
"""But the one whose memory holds a drawing's ten tokens."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_can_be_served(preset: str) -> None:
    overrides = (f"preset={preset}", "trace=synthetic") if preset == "mooncake_paper" else (f"preset={preset}",)
    plan = plan_of(overrides)
    emulators: list[Emulator] = []

    def prepare(emulator: Emulator) -> None:
        APIS[api_of(plan.choices["rules"])](emulator, ApiSettings())
        emulators.append(emulator)

    capacity = plan.tiers[0].capacity_pages
    prompt = list(range(3000 if capacity is None else min(3000, capacity * plan.page_tokens // 2)))
    cached = after_requests(overrides, [prompt, prompt], prepare=prepare, output=2)
    assert sum(cached[0]) == 0 < sum(cached[1]) <= len(prompt)
    (emulator,) = emulators
    assert emulator.unfinished == emulator.running == memory_of(emulator).used == 0
    for cache in emulator.cluster.caches:
        assert not cache.pages_known()
        cache.check()
