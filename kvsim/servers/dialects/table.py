"""The dialects by the names of their engines, and which of them a server speaks."""

from kvsim.servers.dialects.base import Dialect
from kvsim.servers.dialects.openai import OpenAI, model_cards
from kvsim.servers.dialects.sglang import Sglang
from kvsim.servers.dialects.vllm import Vllm
from kvsim.servers.http import Http

DIALECTS: dict[str, Dialect] = {dialect.engine: dialect for dialect in (Vllm(), Sglang(), OpenAI())}


async def dialect_of(http: Http, engine: str) -> Dialect:
    """Return the dialect of an engine; of ``auto``, that of the server, which is in the list of its models.

    Raises UsageError if the server does not answer.
    """
    if engine != "auto":
        return DIALECTS[engine]
    owners = [str(card.get("owned_by")) for card in await model_cards(http)]
    return next((DIALECTS[owner] for owner in owners if owner in DIALECTS), DIALECTS["openai"])
