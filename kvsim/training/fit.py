"""Fits a perceptron to recorded decisions, with torch."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvsim.errors import UsageError
from kvsim.policies.eviction.leaf_features import FEATURES
from kvsim.policies.eviction.leaf_model import LeafModel
from kvsim.training.decisions import Decision, padded
from kvsim.training.settings import BELADY, TrainSettings

if TYPE_CHECKING:
    import torch

HELD_OUT = 0.2
"""Share of the decisions, the latest ones, that say when to stop."""
BATCH = 256


class Fitted(NamedTuple):
    """A model, and how well it decides where it was not fitted, still within the part of the trace that it was trained on."""

    model: LeafModel
    losses: list[float]
    """Of the decisions held out, after each epoch."""
    agreement: float
    """Share of them in which the model lets go what Belady would."""
    lru_agreement: float
    """That of the least recently used candidate."""


def check_torch() -> None:
    """Raise UsageError without torch, which fits models."""
    if find_spec("torch") is None:
        raise UsageError("kvsim train needs the package torch: pip install kvsim[hardware]")


def fit(decisions: Sequence[Decision], settings: TrainSettings, seed: int) -> Fitted:
    """Fit a model: the state with the least loss on the decisions held out counts.

    ``belady`` maximises the likelihood that the victim, drawn with odds exp(-score), is one that Belady would let go; ``reuse``
    makes the score the log odds that a leaf is used again. The same decisions and seed give the same model on one machine.
    """
    import torch

    cut = max(1, int(len(decisions) * (1 - HELD_OUT)))
    learned, held_out = decisions[:cut], decisions[cut:] or decisions[:1]
    rows = np.concatenate([decision.features for decision in learned])
    mean, scale = rows.mean(axis=0), rows.std(axis=0)
    scale[scale < 1e-9] = 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    try:
        layers, losses = _trained(_tensors(learned, mean, scale), _tensors(held_out, mean, scale), settings, seed)
    finally:
        torch.set_num_threads(threads)
    model = LeafModel(mean, scale, layers)
    return Fitted(model, losses, agreement(held_out, model.scores), agreement(held_out, None))


def agreement(decisions: Sequence[Decision], scores: Callable[[np.ndarray], np.ndarray] | None) -> float:
    """Return in which share of decisions the lowest score, or without scores the least recent use, is Belady's choice."""
    lowest = [int(np.argmin(one.last_uses if scores is None else scores(one.features))) for one in decisions]
    return float(np.mean([one.best[place] for one, place in zip(decisions, lowest, strict=True)]))


def _tensors(decisions: Sequence[Decision], mean: np.ndarray, scale: np.ndarray) -> "tuple[torch.Tensor, ...]":
    import torch

    features, best, reused, there = padded(decisions)
    return tuple(torch.from_numpy(array) for array in ((features - mean) / scale, best, reused, there))


def _trained(
    learned: "tuple[torch.Tensor, ...]", held_out: "tuple[torch.Tensor, ...]", settings: TrainSettings, seed: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[float]]:
    import torch

    order = torch.Generator().manual_seed(seed)
    network = _network(settings.hidden, order)
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    loss_of = _imitation if settings.target == BELADY else _reuse
    losses: list[float] = []
    best: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(settings.epochs):
        places = torch.randperm(len(learned[0]), generator=order)
        for start in range(0, len(places), BATCH):
            rows = places[start : start + BATCH]
            optimizer.zero_grad()
            loss = loss_of(network, *(tensor[rows] for tensor in learned))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            losses.append(float(loss_of(network, *held_out)))
        if losses[-1] == min(losses):
            best = _layers(network)
    return best, losses


def _network(hidden: int, generator: "torch.Generator") -> "torch.nn.Sequential":
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(len(FEATURES), hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)).double()
    with torch.no_grad():
        for parameter in network.parameters():
            width = parameter.shape[-1] if parameter.dim() > 1 else hidden
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * width**-0.5)
    return network


def _imitation(
    network: "torch.nn.Module", features: "torch.Tensor", best: "torch.Tensor", reused: "torch.Tensor", there: "torch.Tensor"
) -> "torch.Tensor":
    import torch

    scores: torch.Tensor = network(features)[..., 0]
    odds = (-scores).masked_fill(torch.logical_not(there), -float("inf"))
    chosen = odds.masked_fill(torch.logical_not(best), -float("inf"))
    return (odds.logsumexp(dim=1) - chosen.logsumexp(dim=1)).mean()


def _reuse(
    network: "torch.nn.Module", features: "torch.Tensor", best: "torch.Tensor", reused: "torch.Tensor", there: "torch.Tensor"
) -> "torch.Tensor":
    import torch

    scores: torch.Tensor = network(features)[..., 0]
    return torch.nn.functional.binary_cross_entropy_with_logits(scores[there], reused[there].to(scores.dtype))


def _layers(network: "torch.nn.Sequential") -> list[tuple[np.ndarray, np.ndarray]]:
    values = [parameter.detach().numpy() for parameter in network.parameters()]
    return [(weights.T.copy(), biases.copy()) for weights, biases in zip(values[::2], values[1::2], strict=True)]
