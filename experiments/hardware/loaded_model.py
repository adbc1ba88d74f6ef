"""A model on a GPU without a serving engine, for studies that time single steps, and what these studies have in common."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

import kvsim.conf
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSource, ModelSpec
from kvsim.plans.construct import construct
from kvsim.report.study import Claim, claim_table
from kvsim.substrate.hardware.device import find_device

if TYPE_CHECKING:
    import torch

    from kvsim.substrate.hardware.model.transformer import Transformer
    from kvsim.substrate.hardware.stopwatch import Stopwatch

HERE = Path(__file__).resolve().parent
PAGE_TOKENS, SEED = 16, 0


def model_name(is_tiny: bool) -> str:
    """Return the name of the model to load."""
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

        from kvsim.substrate.hardware.model.transformer import Transformer
        from kvsim.substrate.hardware.stopwatch import Stopwatch

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
    """Return the GPU's name, or "A CPU"."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "A CPU"


def options_of(doc: str | None, arguments: Sequence[str] | None, *, has_hardware: bool = True) -> argparse.Namespace:
    """Parse the options of a study: ``hardware``, unless it needs none, ``tiny`` and ``output``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_hardware:
        parser.add_argument("--hardware", default="h200_measured", help="the machine's description")
    parser.add_argument("--tiny", action="store_true", help="a few small cases, for the CPU")
    parser.add_argument("--output", type=Path, default=HERE, metavar="DIR", help="folder for the page")
    return parser.parse_args(arguments)


def publish(file: Path, lines: Sequence[str], claims: Sequence[Claim]) -> int:
    """Print and write a page that ends with its claims. Returns the exit code: 1 if one fails."""
    text = "\n".join([*lines, "", *claim_table(claims)]) + "\n"
    print(text)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return 0 if all(claim.holds for claim in claims) else 1


def made_on(options: argparse.Namespace) -> str:
    """Return what a page says of the machine, the model and the description."""
    return f"{device_name()}, `model={model_name(options.tiny)}`, expected by `hardware={options.hardware}`"
