"""Bytes and FLOPs of a model. ``kvsim.model.ModelSpec`` is what settings files name."""

from kvsim.model.spec import ModelSpec

__all__ = ["ModelSpec"]
