"""What the tests of engines play: conversations made from a seed and, where they are there, recorded ones."""

from pathlib import Path

import pytest

from kvsim.core.request import Request
from kvsim.trace.mooncake import Mooncake
from tests.workloads import conversations


@pytest.fixture(scope="session")
def chats() -> dict[int, list[Request]]:
    """By page size, 400 requests: prompts with full pages of 16 tokens only, and with partial ones of 512."""
    return {16: conversations(2, requests=400, page_tokens=16), 512: conversations(3, requests=400, page_tokens=512)}


@pytest.fixture(scope="session")
def conversation(shared: Path) -> list[Request]:
    """The requests for which hits of the engines themselves were recorded."""
    return Mooncake(path=str(shared / "traces" / "mooncake_conversation_trace.jsonl.gz"), limit=2_000).load(512).requests
