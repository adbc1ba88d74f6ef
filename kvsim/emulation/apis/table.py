"""The interfaces of emulated servers by name."""

from kvsim.emulation.apis.base import Api
from kvsim.emulation.apis.openai import OpenAI
from kvsim.emulation.apis.sglang import Sglang
from kvsim.emulation.apis.vllm import Vllm

APIS: dict[str, type[Api]] = {api.engine: api for api in (Vllm, Sglang, OpenAI)}
API_OF = {
    **dict.fromkeys(("vllm", "vllm_hybrid", "vllm_window", "default"), "vllm"),
    **dict.fromkeys(("sglang", "sglang_mamba"), "sglang"),
}
"""The interface of the engine whose rules are chosen, by the name of the rules; of others, that is OpenAI's alone. kvsim's own
rules are behind vLLM's, which most clients know."""


def api_of(rules: str) -> str:
    """Return the name of the interface that goes with rules."""
    return API_OF.get(rules, "openai")
