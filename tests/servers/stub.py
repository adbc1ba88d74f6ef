"""A server that answers each path with the same words, whatever it is asked."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread

from kvsim.emulation.http_server import TEXT, HttpRequest, HttpServer, Reply
from tests.waiting import LONG_S, join

MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 100}]}


@contextmanager
def answering(answers: Mapping[str, object]) -> Iterator[str]:
    """Answer these paths (text as it is, a number as a status, anything else as JSON), others with 404. Yields the address."""

    async def handler(request: HttpRequest, reply: Reply) -> None:
        answer = answers.get(request.path, 404)
        if isinstance(answer, int):
            await reply.whole(answer)
        elif isinstance(answer, str):
            await reply.whole(200, answer, "text/html" if answer.startswith("<") else TEXT)
        else:
            await reply.whole(200, answer)

    loop, stopped, is_up = asyncio.new_event_loop(), asyncio.Event(), Event()
    ports: list[int] = []

    async def serve() -> None:
        server = HttpServer(handler)
        ports.append(await server.start("127.0.0.1", 0))
        is_up.set()
        await stopped.wait()
        await server.close()

    thread = Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert is_up.wait(LONG_S)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stopped.set)
        join(thread)
        loop.close()
