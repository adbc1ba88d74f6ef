"""``kvsim calibrate``: measures this machine and writes the results as a choice for ``hardware=``."""

import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

import kvsim.conf
from kvsim.commands.application import run_application
from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.hardware.noise import Noise
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSource, ModelSpec
from kvsim.numbers import Whole, check_settings
from kvsim.plans.build import check_output
from kvsim.plans.construct import construct
from kvsim.report.terminal import print_table
from kvsim.settings.configuration import Asked, without_hydra

if TYPE_CHECKING:
    import torch

    from kvsim.calibration.machine import Measured

MOST_INTERPRETED_PARAMETERS = 10_000_000
COMMENTS = {
    "flops_per_s": "Rate of products of large random matrices, bf16 on a GPU.",
    "memory_bytes": "Memory of the GPU.",
    "memory_bytes_per_s": "Rate of a copy within GPU memory, counting bytes read and bytes written.",
    "gpus": "GPUs that serve one model together, tensor-parallel. One was measured.",
    "host_to_device_bytes_per_s": "Rate of one long copy from pinned host memory to the GPU.",
    "device_to_host_bytes_per_s": "Rate of one long copy from the GPU to pinned host memory.",
    "both_directions_bytes_per_s": "Total rate while both directions are busy.",
    "host_latency_s": "Time from the request of a copy to its first byte, for the fragments of the model's pages.",
    "copy_overhead_s": "Further latency of a copy between GPU and host while the serving engine launches steps.",
    "disk_read_bytes_per_s": "Rate of reading pages: the fastest of disk_curves.",
    "disk_write_bytes_per_s": "Rate of writing pages: the fastest of disk_curves.",
    "disk_latency_s": "Time to read one small page on an idle disk.",
    "flops_efficiency": "1: flops_per_s is measured.",
    "memory_efficiency": "1: memory_bytes_per_s is measured.",
    "step_overhead_s": "Time that a decode step of the serving engine takes beyond the sum of its parts.",
    "leap_overhead_s": "Further time of decode steps in a row, once, before the engine decides anew.",
    "copy_leap_s": "Further time of decode steps in a row, once, if copies from or to the GPU begin with them.",
    "prefill_overhead_s": "Further overhead of a step with prefill, on top of that of a decode step.",
    "prefill_launch_s": "Time the host needs to launch a step with one chunk of a prompt; a step with prefill never takes less.",
    "chunk_launch_s": "Further time to launch each further chunk.",
    "decode_launch_s": "Further time to launch the requests that decode beside prefill.",
    "copy_launch_s": "Further time to launch a step with prefill if copies from or to the GPU begin with it.",
    "rank_jitter": "Spread of the tensor-parallel ranks' speeds: for every transfer, each rank moves its part of the pages at\n"
    "# its rate times a factor drawn evenly from 1 - rank_jitter to 1. The slowest rank decides when a transfer ends and what\n"
    "# a cancelled one has brought. Not measured.",
    "rank_faults": "Ranks that are slow on a link, or fail to read or write pages of the disk:\n"
    "# [{rank: 3, link: disk-cpu, speed: 0.5, share: 0.01}] halves the speed and lets 1% of the pages fail. A page counts only\n"
    "# if every rank has it.",
    "interconnect_bytes_per_s": "Rate at which a GPU sends, and receives, pages between engines. Not measured.",
    "interconnect_latency_s": "Time from the request of such a copy to its first byte. Not measured.",
    "host_memory_bytes_per_s": "Limit on the total rate of the host links of all engines of one host; null: none. Not measured.",
    "cluster_disk_read_bytes_per_s": "Rate of reads from a disk that all hosts share; null: as from a host's own. Not measured.",
    "cluster_disk_write_bytes_per_s": "The same for writes. Not measured.",
    "link_curves": "Rows of [fragment_bytes, latency_s, bytes_per_s]; for both_directions [fragment_bytes, bytes_per_s].",
    "disk_curves": "Rows of [depth, page_bytes, bytes_per_s]; both: total rate of concurrent reads and writes.\n"
    "# depth: concurrent requests, the number of disk threads.",
    "compute_curves": "Rows: linear [flops_per_byte, flops_per_s]; prefill_attention [query_rows, context_tokens, flops_per_s];\n"
    "# decode_attention [bytes read per layer, bytes_per_s]. Recurrences of hybrid models: scan [tokens of a chunk, state\n"
    "# elements times tokens per second]; state_update [bytes of states read and written per layer, bytes_per_s] of decoding\n"
    "# requests; null if not measured. Context that several decoding requests have in common takes only repeated_context_share\n"
    "# of its time after the first of them. A step with prefill takes as long as one with the next multiple of\n"
    "# prefill_tile_tokens; a rested GPU needs only rested_prefill_share of that time. warming_s: time constant of becoming\n"
    "# busy or rested.",
    "copy_rule": "Rule by which substrate=hardware copies pages of each size: by kernel, staged, or by memcpy.",
    "noise": "How far durations of equal work are apart, from repeated steps, launches, copies, reads and writes. run: standard\n"
    "# deviation of the logarithm of a factor that a whole run shares. correlation: from one duration to the next. each: rows\n"
    "# of [probability, factor], quantiles of a duration's own factor. seed: tells runs apart. noise: null simulates without.",
}


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """The settings of ``conf/calibrate.yaml`` other than the model."""

    name: str
    overwrite: bool
    output: str | None
    disk: str
    page_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"name must start with a lower-case letter, then lower-case letters, digits and underscores, not {self.name!r}"
            )
        check_settings(self, Whole(1), "page_tokens")
        check_settings(self, Whole(), "seed")

    @property
    def file(self) -> Path:
        """Path of the file to write."""
        folder = Path(self.output) if self.output else Path(str(files(kvsim.conf))) / "hardware"
        return folder / f"{self.name}.yaml"


def start(asked: Asked) -> None:
    """Run the calibration."""
    chosen = asked.overrides
    calibrate(without_hydra(asked.config).config, chosen)


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("calibrate", start, arguments, config_name="calibrate")


def calibrate(cfg: DictConfig, chosen: list[str]) -> None:
    """Measure the machine, write the file, print the tables. Raises UsageError."""
    config = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    settings = construct(CalibrateSettings, {name: value for name, value in config.items() if name != "model"}, "")
    check_file(settings)
    model = construct(ModelSource, config.get("model"), "model").spec()  # reports a mistake before torch is loaded
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
    text = written(measured, header(device, model))
    check_text(text)
    check_file(settings)  # which may have been written meanwhile
    with replacing(settings.file) as file:
        file.write(text.encode())
    print_measured(measured, console)  # last, because whoever reads the output may stop reading
    console.print(f"\n{settings.file}: for hardware={settings.name} ({time.perf_counter() - began:.0f} s)", highlight=False)
    if device.type != "cuda":
        console.print("There is no GPU: these numbers describe Triton's interpreter, not a machine worth simulating.")


def check_file(settings: CalibrateSettings) -> None:
    """Raise UsageError if the file must not be overwritten or cannot be written, or if the disk's folder does not exist."""
    if settings.file.exists() and not settings.overwrite:
        raise UsageError(f"{settings.file} already exists: choose another name=NAME, or set overwrite=true")
    if not settings.file.parent.is_dir():
        raise UsageError(f"output: there is no folder {settings.file.parent}")
    check_output(settings.file.parent)
    if not Path(settings.disk).is_dir():
        raise UsageError(f"disk: there is no folder {settings.disk}")


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


def yaml_value(value: Any) -> str:
    """Return a setting's value as YAML."""
    if value is None:
        return "null"
    return str(value) if isinstance(value, list) else number(value)


def written(measured: "Measured", first_lines: str) -> str:
    """Return the text of the file."""
    lines = [first_lines, "_target_: kvsim.hardware.HardwareSpec"]
    for field in fields(HardwareSpec):
        if "tier" in field.metadata:  # a setting of that tier, not of the machine
            continue
        value = getattr(measured.hardware, field.name)
        lines += ["", f"# {COMMENTS[field.name]}"]
        lines += setting_lines(field.name, value, "")
    return "\n".join(lines) + "\n"


def setting_lines(name: str, value: Any, indent: str) -> list[str]:
    """Return the lines of a setting; rows of numbers and parts of a group have lines of their own."""
    if is_dataclass(value):
        parts = [setting_lines(part.name, getattr(value, part.name), f"{indent}  ") for part in fields(value)]
        return [f"{indent}{name}:", *chain.from_iterable(parts)]
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [f"{indent}{name}:", *(f"{indent}  - [{', '.join(number(x) for x in row)}]" for row in value)]
    return [f"{indent}{name}: {yaml_value(value)}"]


def number(value: float) -> str:
    """Format a number with four digits so that every YAML parser reads it as a number; integers stay unchanged."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.3e}" if value >= 1e3 or 0 < value < 1e-2 else f"{value:.4g}" + ("" if value % 1 else ".0")


def check_text(text: str) -> None:
    """Raise UsageError if the text is not valid for ``hardware=``."""
    construct(HardwareSpec, OmegaConf.to_container(OmegaConf.create(text)), "hardware")


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


def micro(value: float) -> str:
    return f"{value * 1e6:.4g}"


def show(console: Console, title: str, columns: list[str], rows: Sequence[tuple[str, ...]]) -> None:
    left = [place for place, column in enumerate(columns) if not column]
    print_table(console, columns, rows, console.width, words=left, left=left, title=title)
