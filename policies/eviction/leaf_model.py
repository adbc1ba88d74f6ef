"""A trained model of leaves, and its file: layers of a perceptron, and how it was trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvsim.policies.eviction.leaf_features import FEATURES, Vector

FORMAT: Final = 1
DEFAULT: Final = Path(str(files("kvsim.policies.eviction") / "learned_default.json"))
"""The model that comes with kvsim. A compiled module does not know its own file's path."""


@dataclass(eq=False)
class LeafModel:
    """Scores leaves: a perceptron with rectified hidden layers, on features shifted by ``mean`` and divided by ``scale``.

    Nothing of it is to be changed. It computes the same with fewer steps: shift and scale are parts of the first weights, and as
    max(x + bias, 0) is max(x, -bias) + bias, each bias passes through to the last one.
    """

    mean: Vector
    scale: Vector
    layers: Sequence[tuple[Vector, Vector]]
    """Weights [inputs, outputs] and biases; the last layer has one output."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained, on what, and what came out."""

    def __post_init__(self) -> None:
        self._hidden: list[tuple[Vector, Vector]] = []
        """Weights [outputs, inputs] and the least values [outputs] of the hidden layers."""
        bias = -(self.mean / self.scale)
        divisor = self.scale
        for weights, biases in self.layers:
            bias = bias @ weights + biases
            self._hidden.append((np.ascontiguousarray((weights / divisor[:, np.newaxis]).T), -bias))
            divisor = np.ones(len(bias))
        last, least = self._hidden.pop()
        self._last, self._bias = last[0], -float(least[0])
        self._leaves = 0
        self._steps: list[tuple[Vector, Vector]] = []
        """The hidden layers, for ``_leaves`` leaves: numpy takes the larger of two whole arrays in half of the time."""

    def scores(self, features: Vector) -> Vector:
        """Return what each leaf is worth, [leaves], of features [leaves, FEATURES]; the lowest leaves first."""
        if len(features) != self._leaves:
            self._leaves = len(features)
            self._steps = [(weights, np.repeat(least[:, np.newaxis], self._leaves, axis=1)) for weights, least in self._hidden]
        values = features.T
        for weights, least in self._steps:
            values = weights.dot(values)
            np.maximum(values, least, out=values)
        scores: Vector = self._last.dot(values) + self._bias
        return scores

    def text(self) -> str:
        """Return the content of its file."""
        record = {
            "kvsim_leaf_model": FORMAT,
            "features": FEATURES,
            "mean": self.mean.tolist(),
            "scale": self.scale.tolist(),
            "layers": [{"weights": weights.tolist(), "biases": biases.tolist()} for weights, biases in self.layers],
            "training": self.training,
        }
        return json.dumps(record, indent=1) + "\n"


def read_model(path: Path) -> LeafModel:
    """Read a file that ``kvsim train`` wrote. Raises ValueError for any other, and one whose features are not today's."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"path: {path}: {error.strerror}: train one with kvsim train") from error
    except ValueError as error:
        raise ValueError(f"path: {path} is no model: {error}: train one with kvsim train") from error
    if not isinstance(record, dict) or record.get("kvsim_leaf_model") != FORMAT:
        raise ValueError(f"path: {path} is no model of kvsim train, or one of another version: train it again")
    if record.get("features") != list(FEATURES):
        raise ValueError(f"path: {path} was trained on other features than this version of kvsim has: train it again")
    try:
        layers = [(_numbers(layer["weights"], 2), _numbers(layer["biases"], 1)) for layer in record["layers"]]
        if not layers:
            raise ValueError("it has no layers")
        model = LeafModel(_numbers(record["mean"], 1), _numbers(record["scale"], 1), layers, record["training"])
        if model.scores(np.zeros((1, len(FEATURES)))).shape != (1,):
            raise ValueError("its layers do not fit together")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"path: {path} is damaged: {error}: train it again") from error
    return model


def _numbers(values: Any, dimensions: int) -> Vector:
    array = np.array(values, dtype=np.float64)
    if array.ndim != dimensions or not np.isfinite(array).all():
        raise ValueError("a number is missing")
    return array
