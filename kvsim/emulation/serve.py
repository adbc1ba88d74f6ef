"""Serves an emulator on a port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvsim.emulation.emulator import Emulator
from kvsim.emulation.http_server import Handler, HttpServer


@asynccontextmanager
async def running(emulator: Emulator, server: HttpServer) -> AsyncIterator[None]:
    """Let an emulator's time pass while the block runs, and close its server after that.

    An error of the emulator ends the block.
    """
    try:
        async with asyncio.TaskGroup() as group:
            clock = group.create_task(emulator.run())
            yield
            clock.cancel()
    finally:
        await server.close()


@asynccontextmanager
async def serving(emulator: Emulator, handler: Handler, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    """Answer requests with ``handler``, mostly that of an interface over the emulator, while the block runs; yields the port.

    An error of the emulator ends the block. Raises OSError if the port cannot be had.
    """
    server = HttpServer(handler)
    async with running(emulator, server):
        yield await server.start(host, port)
