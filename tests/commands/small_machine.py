"""A model and a machine in round numbers: a FLOP takes a second, memory no time."""

from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec

MODEL = ModelSpec(layers=1, hidden_size=2, vocabulary=5, heads=2, kv_heads=1, head_dim=1, mlp_width=3)
"""60 FLOPs a token, 20 for one that is sampled, 8 a pair."""
MACHINE = HardwareSpec(
    flops_per_s=1.0,
    memory_bytes=1,
    memory_bytes_per_s=1e9,
    host_to_device_bytes_per_s=1,
    device_to_host_bytes_per_s=1,
    both_directions_bytes_per_s=1,
    disk_read_bytes_per_s=1,
    disk_write_bytes_per_s=1,
    step_overhead_s=0.0,
)
