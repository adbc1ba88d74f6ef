"""Rates of a machine. ``kvsim.hardware.HardwareSpec`` is what settings files name."""

from kvsim.hardware.spec import HardwareSpec, LinearHardware

__all__ = ["HardwareSpec", "LinearHardware"]
