"""``kvsim calibrate``: measures this machine, or a server, and writes the results as a choice for ``hardware=``."""

import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

import kvsim.conf
from kvsim.commands.application import run_application
from kvsim.commands.calibrate_settings import CalibrateSettings, check_effect, check_file
from kvsim.commands.hardware_file import COMMENTS, check_text, micro, number, show, written
from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.hardware.noise import Noise
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSource, ModelSpec
from kvsim.plans.construct import construct
from kvsim.settings.configuration import Asked, without_hydra

if TYPE_CHECKING:
    import torch

    from kvsim.calibration.machine import Measured

MOST_INTERPRETED_PARAMETERS = 10_000_000


def start(asked: Asked) -> None:
    """Run the calibration."""
    chosen = asked.overrides
    config, choices = without_hydra(asked.config)
    calibrate(config, chosen, str(choices["hardware"]))


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("calibrate", start, arguments, config_name="calibrate")


def calibrate(cfg: DictConfig, chosen: list[str], machine: str) -> None:
    """Measure a machine, write the file, print the tables. ``machine`` names the choice of ``hardware``. Raises UsageError."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    own = {name: value for name, value in config.items() if name not in ("model", "hardware")}
    settings = construct(CalibrateSettings, own, "")
    check_effect(settings, chosen)
    check_file(settings)
    model = construct(ModelSource, config.get("model"), "model").spec()  # reports a mistake before torch is loaded
    if settings.is_of_server:
        from kvsim.commands.calibrate_server import calibrate_server

        calibrate_server(settings, model, construct(HardwareSpec, config.get("hardware"), "hardware"), machine)
    else:
        calibrate_machine(settings, model, chosen)


def calibrate_machine(settings: CalibrateSettings, model: ModelSpec, chosen: list[str]) -> None:
    """Measure this machine, write the file, print the tables. Raises UsageError."""
    from kvsim.substrate.hardware.device import find_device

    device = find_device()  # before Triton is imported
    from kvsim.calibration.engine_overhead import with_overheads
    from kvsim.calibration.engine_warming import with_warming
    from kvsim.calibration.machine_noise import measured_noise

    if device.type != "cuda" and not any(re.match(r"[+~]*model[.=]", override) for override in chosen):
        tiny = OmegaConf.to_container(OmegaConf.create((files(kvsim.conf) / "model" / "tiny.yaml").read_text()))
        model = construct(ModelSource, tiny, "model").spec()
    if device.type != "cuda" and model.parameters > MOST_INTERPRETED_PARAMETERS:
        raise UsageError(f"model: {model.parameters / 1e9:.1f} billion weights are too many without a GPU: set model=tiny")
    console = Console()
    began = time.perf_counter()
    measured = measure(settings, model, device, console)
    with console.status("measuring the serving engine"):
        known = with_overheads(model, measured.hardware, settings.page_tokens, device)
        measured = replace(measured, hardware=with_warming(model, known, settings.page_tokens, device))
    with console.status("") as status, disk_errors(settings):
        noise = measured_noise(
            model,
            measured.hardware,
            settings.page_tokens,
            Path(settings.disk),
            device=device,
            seed=settings.seed,
            say=status.update,
        )
    measured = replace(measured, hardware=replace(measured.hardware, noise=noise))
    text = written(measured.hardware, header(device, model), COMMENTS)
    check_text(text)
    check_file(settings)  # which may have been written meanwhile
    with replacing(settings.file) as file:
        file.write(text.encode())
    print_measured(measured, console)  # last, because whoever reads the output may stop reading
    console.print(f"\n{settings.file}: for hardware={settings.name} ({time.perf_counter() - began:.0f} s)", highlight=False)
    if device.type != "cuda":
        console.print("There is no GPU: these numbers describe Triton's interpreter, not a machine worth simulating.")


def measure(settings: CalibrateSettings, model: ModelSpec, device: "torch.device", console: Console) -> "Measured":
    """Measure the machine. Raises UsageError for a model that it cannot run and for a disk that cannot be used."""
    from kvsim.calibration.machine import Calibration

    folder = Path(settings.disk)
    try:
        with console.status("") as status, disk_errors(settings):
            return Calibration(
                model, settings.page_tokens, folder, device=device, seed=settings.seed, say=lambda part: status.update(part)
            ).run()
    except ValueError as error:
        raise UsageError(f"model: {error}") from error


@contextmanager
def disk_errors(settings: CalibrateSettings) -> Iterator[None]:
    """Turn errors of the disk into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"disk: cannot use {settings.disk}: {error.strerror}") from error


def header(device: "torch.device", model: ModelSpec) -> str:
    """Return the first lines of the file."""
    import torch
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter, no GPU"
    return (
        f"# {name}, measured by kvsim calibrate with a model of {model.layers} layers, hidden size {model.hidden_size};\n"
        f"# torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}."
    )


def print_measured(measured: "Measured", console: Console) -> None:
    """Print one table for each part of the machine."""
    spec = measured.hardware
    assert spec.link_curves and spec.disk_curves and spec.compute_curves and spec.copy_rule
    peaks = [
        ("matrix products, TFLOP/s", tera(spec.flops_per_s)),
        ("memory, GB/s", giga(spec.memory_bytes_per_s)),
        ("memory, GB", giga(spec.memory_bytes)),
        ("host to GPU, GB/s", giga(spec.host_to_device_bytes_per_s)),
        ("GPU to host, GB/s", giga(spec.device_to_host_bytes_per_s)),
        ("both directions together, GB/s", giga(spec.both_directions_bytes_per_s)),
        ("kernel launch, µs", micro(measured.launch_s)),
        ("step overhead, µs", micro(spec.step_overhead_s)),
        ("extra overhead of decode steps in a row, µs", micro(spec.leap_overhead_s)),
        ("extra overhead with prefill, µs", micro(spec.prefill_overhead_s)),
        ("launch of a step with prefill, µs", micro(spec.prefill_launch_s)),
        ("launch of each further chunk, µs", micro(spec.chunk_launch_s)),
        ("launch of decoding requests beside prefill, µs", micro(spec.decode_launch_s)),
        ("launch of copies beside prefill, µs", micro(spec.copy_launch_s)),
        ("launch of copies beside decode steps, µs", micro(spec.copy_leap_s)),
        ("extra latency of copies while serving, µs", micro(spec.copy_overhead_s)),
        ("decode attention, repeated / own context", f"{spec.compute_curves.repeated_context_share:.3f}"),
        ("prefill time, rested / busy GPU", f"{spec.compute_curves.rested_prefill_share:.3f}"),
        ("time constant of becoming busy, ms", f"{spec.compute_curves.warming_s * 1e3:.0f}"),
        ("disk latency, µs", micro(spec.disk_latency_s)),
    ]
    show(console, "Machine", ["", "measured"], peaks)
    links = spec.link_curves
    copies = [
        (f"{down[0]:,}", giga(down[2]), micro(down[1]), giga(up[2]), micro(up[1]), giga(both[1]))
        for down, up, both in zip(links.host_to_device, links.device_to_host, links.both_directions, strict=True)
    ]
    show(console, "Page copies", ["fragment bytes", "to GPU, GB/s", "µs", "to host, GB/s", "µs", "both, GB/s"], copies)
    show(console, "Copy rule", ["", "measured"], [(key, number(value)) for key, value in asdict(spec.copy_rule).items()])
    rows = zip(spec.disk_curves.read, spec.disk_curves.write, spec.disk_curves.both or (), strict=True)
    disk = [(f"{read[0]}", f"{read[1]:,}", giga(read[2]), giga(write[2]), giga(both[2])) for read, write, both in rows]
    cached = "" if measured.is_direct else ", through the page cache (the file system does not support O_DIRECT)"
    show(console, f"Disk{cached}", ["depth", "page bytes", "read, GB/s", "write, GB/s", "both, GB/s"], disk)
    curves = spec.compute_curves
    products = [(f"{x:.4g}", tera(rate)) for x, rate in curves.linear]
    show(console, "Matrix products of a step", ["FLOPs per byte of weights", "TFLOP/s"], products)
    chunks = [(f"{rows:,}", f"{context:,}", tera(rate)) for rows, context, rate in curves.prefill_attention]
    show(console, "Attention of a chunk", ["query rows", "context tokens", "TFLOP/s"], chunks)
    decodes = [(f"{n_bytes:,}", giga(rate)) for n_bytes, rate in curves.decode_attention]
    apart = f" (equal contexts, times up to {measured.decode_spread:.2f}x apart)" if measured.decode_spread > 1 else ""
    show(console, f"Attention of decoding requests{apart}", ["bytes per layer", "GB/s"], decodes)
    if curves.scan is not None and curves.state_update is not None:
        scans = [(f"{tokens:,}", giga(rate)) for tokens, rate in curves.scan]
        show(console, "Recurrence of a chunk", ["tokens", "billion elements/s"], scans)
        updates = [(f"{n_bytes:,}", giga(rate)) for n_bytes, rate in curves.state_update]
        show(console, "Recurrence of decoding requests", ["bytes per layer", "GB/s"], updates)
    if spec.noise is not None:
        show(
            console, "Noise: factors of durations", ["", "run", "5%", "95%", "99%", "most", "correlation"], noise_rows(spec.noise)
        )


def noise_rows(noise: Noise) -> list[tuple[str, ...]]:
    """Return the kinds of durations with the spread of runs, and quantiles and correlation of factors."""
    known = [(field.name, getattr(noise, field.name)) for field in fields(noise) if field.name != "seed"]
    rows = []
    for name, variation in known:
        if variation is not None:
            quantiles = dict(variation.each)
            factors = [number(quantiles[probability]) for probability in (0.05, 0.95, 0.99, 1.0)]
            rows.append((name.replace("_", " "), f"± {variation.run:.1%}", *factors, f"{variation.correlation:.2f}"))
    return rows


def tera(value: float) -> str:
    return f"{value / 1e12:.4g}"


def giga(value: float) -> str:
    return f"{value / 1e9:.4g}"
