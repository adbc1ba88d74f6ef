"""The interfaces of emulated servers by name."""

from kvsim.emulation.apis.base import Api
from kvsim.emulation.apis.openai import OpenAI
from kvsim.emulation.apis.sglang import Sglang
from kvsim.emulation.apis.vllm import Vllm

APIS: dict[str, type[Api]] = {"vllm": Vllm, "sglang": Sglang, "openai": OpenAI}
