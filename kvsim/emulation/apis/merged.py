"""Several answers as one stream."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvsim.emulation.apis.base import growing
from kvsim.emulation.served import Served


async def merged(served: Sequence[Served]) -> AsyncIterator[tuple[int, int, int]]:
    """Yield (which answer, its tokens told before, its tokens now) each time that one of the answers has grown.

    Raises BadRequest if a request is rejected.
    """
    if len(served) == 1:
        told = 0
        async for tokens in growing(served[0]):
            yield 0, told, tokens
            told = tokens
        return
    news: asyncio.Queue[tuple[int, int, int]] = asyncio.Queue()

    async def follow(number: int) -> None:
        told = 0
        async for tokens in growing(served[number]):
            news.put_nowait((number, told, tokens))
            told = tokens

    tasks = [asyncio.create_task(follow(number)) for number in range(len(served))]
    waits: asyncio.Task[tuple[int, int, int]] | None = None
    try:
        left = sum(len(one.answer) for one in served)
        while left:
            waits = asyncio.create_task(news.get())
            await asyncio.wait([waits, *[task for task in tasks if not task.done()]], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if waits.done():
                number, before, now = waits.result()
                left -= now - before
                yield number, before, now
            else:
                waits.cancel()
    finally:
        if waits is not None:
            waits.cancel()
        for task in tasks:
            task.cancel()
