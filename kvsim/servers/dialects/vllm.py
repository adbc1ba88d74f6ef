"""vLLM (read in 0.25.1 and 0.33.0): OpenAI's completions with ``ignore_eos``, facts in ``/metrics`` and ``/server_info``."""

from collections.abc import Sequence
from typing import Any

from kvsim.errors import UsageError
from kvsim.results.observed import ServerFacts
from kvsim.servers.counters import read_samples
from kvsim.servers.dialects.base import Known
from kvsim.servers.dialects.openai import OpenAI, longest, model_cards
from kvsim.servers.http import Http


class Vllm(OpenAI):
    """vLLM's server."""

    engine = "vllm"
    tells_cached = "start vLLM with --enable-prompt-tokens-details"

    def body(self, model: str, prompt: Sequence[int], output_tokens: int) -> dict[str, Any]:
        return super().body(model, prompt, output_tokens) | {"ignore_eos": True}

    async def know(self, http: Http) -> Known:
        cards = await model_cards(http)
        names = [str(card["id"]) for card in cards]
        version = (await http.get("/version")).json()
        caches = [one.labels for one in await read_samples(http) if one.name == "vllm:cache_config_info"]
        labels = caches[0] if caches else {}
        config = (await http.get("/server_info?config_format=json")).json()
        flags = flat(config.get("vllm_config")) if isinstance(config, dict) else {}
        size, blocks = _number(labels.get("block_size")), _number(labels.get("num_gpu_blocks"))
        facts = ServerFacts(
            engine=self.engine,
            version=str(version["version"]) if isinstance(version, dict) and "version" in version else None,
            model=names[0] if names else None,
            page_tokens=size,
            capacity_tokens=None if size is None or blocks is None else (blocks - 1) * size,  # one block is vLLM's own
            settings=flags | {f"cache_config.{name}": value for name, value in labels.items()},
        )
        return Known(facts, names, longest(cards), engines=max(1, len(caches)))

    async def reset(self, http: Http) -> None:
        """Empty the GPU's cache, and that of a connector if there is one. vLLM does not say whether it did."""
        reply = await http.post("/reset_prefix_cache?reset_external=true")
        if not reply.is_good:
            raise UsageError(
                f"{http.url} cannot be told to empty its cache (HTTP {reply.status}): start vLLM with VLLM_SERVER_DEV_MODE=1, or "
                "restart it before each run and set reset=false"
            )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def flat(settings: object, prefix: str = "") -> dict[str, object]:
    """Return nested settings by their full names, ``scheduler_config.max_num_seqs``: numbers, words and lists of them."""
    if not isinstance(settings, dict):
        return {prefix: settings} if prefix else {}
    found: dict[str, object] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found
