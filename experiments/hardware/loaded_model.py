"""A model on a GPU, without a serving engine, whose steps studies time one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

import kvsim.conf
from kvsim.construct import construct
from kvsim.hardware import HardwareSpec
from kvsim.model import ModelSource, ModelSpec
from kvsim.substrate.hardware.device import find_device

if TYPE_CHECKING:
    import torch

    from kvsim.substrate.hardware.stopwatch import Stopwatch
    from kvsim.substrate.hardware.transformer import Transformer

PAGE_TOKENS, SEED = 16, 0


def model_name(is_tiny: bool) -> str:
    """Return the model that decodes."""
    return "tiny" if is_tiny else "llama3_8b"


def choice(group: str, name: str) -> Any:
    """Return a choice of a group of the configuration, as plain data."""
    return OmegaConf.to_container(OmegaConf.create((files(kvsim.conf) / group / f"{name}.yaml").read_text()))


def hardware_of(name: str) -> HardwareSpec:
    """Return the description of a machine."""
    return construct(HardwareSpec, choice("hardware", name), "hardware")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model on the GPU, over a pool of random keys and values."""

    transformer: "Transformer"
    model: ModelSpec
    pages: int
    watch: "Stopwatch"

    @classmethod
    def of(cls, name: str, tokens: int, most_decodes: int) -> "Loaded":
        """Load a model, with room for this many cached tokens, and record steps of up to ``most_decodes`` decoding requests."""
        device = find_device()  # before Triton is imported
        import torch

        from kvsim.substrate.hardware.stopwatch import Stopwatch
        from kvsim.substrate.hardware.transformer import Transformer

        model, pages = construct(ModelSource, choice("model", name), "model").spec(), -(-tokens // PAGE_TOKENS)
        shape = (model.layers, pages, model.page_bytes(PAGE_TOKENS) // model.layers)
        kv = torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 256)
        transformer = Transformer(model, kv, PAGE_TOKENS, device=device, seed=SEED)
        transformer.record_decodes(most_decodes)
        repeats, heat_s = (9, 0.2) if device.type == "cuda" else (1, 0.0)
        return cls(transformer, model, pages, Stopwatch(device, repeats, heat_s))

    def slots(self, counts: Sequence[int]) -> "list[torch.Tensor]":
        """Return lists of this many pages each, all different, in the order of a permutation drawn from ``SEED``."""
        import numpy as np
        import torch

        order = np.random.default_rng(SEED).permutation(self.pages)[: sum(counts)]
        return list(torch.from_numpy(order.astype(np.int32)).to(self.transformer.device).split(list(counts)))


def device_name() -> str:
    """Return the name of what measures."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "A CPU"
