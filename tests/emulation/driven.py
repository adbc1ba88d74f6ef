"""An emulator whose time passes at once, for tests of what it knows after many requests."""

import asyncio
from collections.abc import Callable, Sequence

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.served import Served
from tests.servers.emulated import plan_of

LONG_S = 1000.0


def after_requests(
    overrides: Sequence[str],
    prompts: Sequence[list[int]],
    *,
    output: int = 5,
    look: Callable[[Emulator, int], None] = lambda emulator, number: None,
    prepare: Callable[[Emulator], None] = lambda emulator: None,
) -> list[tuple[int, ...]]:
    """Serve prompts one after another. Returns the cached tokens of each by tier; ``look`` is called after each."""

    async def serve() -> list[tuple[int, ...]]:
        emulator, found = Emulator(plan_of(overrides)), list[tuple[int, ...]]()
        prepare(emulator)
        for number, prompt in enumerate(prompts):
            served: Served = emulator.submit(prompt, output)
            emulator.cluster.env.run(emulator.cluster.env.now + LONG_S)
            assert served.is_ended and not served.is_rejected
            found.append(served.cached_tokens)
            look(emulator, number)
        return found

    return asyncio.run(serve())
