"""``kvsim calibrate server=``: measures the steps of a running server and fits a machine to them."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from math import isinf
from pathlib import Path
from textwrap import wrap

from rich.console import Console

from kvsim.calibration.server.fit import OVERHEADS, Fit, fit_all
from kvsim.calibration.server.measure import MeasureSettings, measure
from kvsim.calibration.server.measurements import Measurements, Quality, read_measurements, write_measurements
from kvsim.calibration.server.step_times import Point, points
from kvsim.commands.calibrate_settings import CalibrateSettings, check_file
from kvsim.commands.hardware_file import COMMENTS, check_text, micro, show, written
from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.files.writing import replacing
from kvsim.hardware.spec import HardwareSpec, LinearHardware
from kvsim.model.spec import ModelSpec
from kvsim.plans.construct import with_key
from kvsim.results.observed import ObservedRun
from kvsim.servers.play import play_server, read_facts
from kvsim.servers.settings import ServerSettings

NOTES = 5
"""Notes of the client that are told; all are in the file of measurements."""
WIDTH = 120
"""Of a line of the file's first comment."""
LEAST_POINTS = 8
"""Batches that must have been read for a fit."""
FITTED = {
    "flops_per_s": "Peak of matrix products, as in hardware={machine} unless the server is faster.",
    "memory_bytes_per_s": "Peak of reads from GPU memory, as in hardware={machine} unless the server is faster.",
    "flops_efficiency": "Fraction of flops_per_s that large matrix products reach, fitted.",
    "memory_efficiency": "Fraction of memory_bytes_per_s that long reads reach, fitted.",
    "step_overhead_s": "Time of a step beyond its parts, fitted.",
    "leap_overhead_s": "0: a server forms each step anew, which is part of step_overhead_s.",
    "copy_leap_s": "0: not seen from outside a server.",
    "prefill_overhead_s": "Further overhead of a step with prefill, fitted.",
    "prefill_launch_s": "Time to launch a step with one chunk of a prompt, fitted; a step with prefill never takes less.",
    "chunk_launch_s": "Further time to launch each further chunk, fitted.",
    "decode_launch_s": "Further time to launch the requests that decode beside prefill, fitted.",
    "request_overhead_s": "Time of a request between client and engine, and of a token on the way back, fitted.",
    "request_token_s": "The same for each token of its prompt, fitted.",
    "compute_curves": COMMENTS["compute_curves"] + "\n# Fitted; null: the roofline above predicts as well.",
    "noise": "null: a server's step is its median.",
}
"""What the comments say of settings that the server has shown."""


def calibrate_server(settings: CalibrateSettings, model: ModelSpec, start: HardwareSpec, machine: str) -> None:
    """Measure a server or read its measurements, fit, write the files, print the tables. Raises UsageError."""
    if isinstance(start, LinearHardware):
        raise UsageError(f"hardware={machine}: step times by a formula cannot be fitted: choose the server's machine")
    console = Console()
    if settings.measured is not None:
        measured = read_measurements(Path(settings.measured))
    else:
        measured = measure_server(settings, model, start, console)
    found = points(measured)
    if settings.measured is None:
        write_file(settings, measurements_file(settings), write_measurements(measured))
    if len([point for point in found if not point.reading.batch.is_held_out]) < LEAST_POINTS:
        notes = "; ".join(measured.notes[:1])
        raise UsageError(
            f"server: only {len(found)} batches could be measured, which is too few to fit{': ' if notes else ''}{notes}"
        )
    fits = fit_all(found, model, start, pads_chunks=settings.pads_chunks)
    text = written(fits[0].hardware, header(measured, fits, found, model), comments(machine))
    check_text(text)
    write_file(settings, settings.file, text.encode())
    print_fits(measured, fits, found, console)
    console.print(f"\n{settings.file}: for hardware={settings.name}", highlight=False, soft_wrap=True)
    if settings.measured is None:
        console.print(f"{measurements_file(settings)}: for measured=, a fit without the server", highlight=False, soft_wrap=True)


def measurements_file(settings: CalibrateSettings) -> Path:
    return settings.file.with_suffix(".measured.json")


def write_file(settings: CalibrateSettings, path: Path, content: bytes) -> None:
    check_file(settings)  # which may have been written meanwhile
    with replacing(path) as file:
        file.write(content)


def measure_server(settings: CalibrateSettings, model: ModelSpec, start: HardwareSpec, console: Console) -> Measurements:
    """Measure the server. Its cache is emptied once, before the first round. Raises UsageError."""
    try:
        server = ServerSettings(url=str(settings.server), model=settings.served_model)
    except ValueError as error:
        raise UsageError(with_key("server", str(error), {})) from error
    asked = MeasureSettings(
        seed=settings.seed,
        seconds=settings.seconds,
        step_tokens=settings.step_tokens,
        longest_tokens=settings.longest_tokens,
    )
    with console.status(f"asking {server.url}") as status:
        return measure(read_facts(server), player(server), model, start, asked, status.update)


def player(server: ServerSettings) -> Callable[[Sequence[Request], int], ObservedRun]:
    """Return what plays rounds: the cache stays as it is from one to the next."""
    return partial(play_server, settings=replace(server, reset=False))


def header(measured: Measurements, fits: Sequence[Fit], found: Sequence[Point], model: ModelSpec) -> str:
    """Return the first lines of the file: comments, whatever the server calls itself."""
    server = " ".join(filter(None, [measured.engine, measured.version, measured.served_model and f"({measured.served_model})"]))
    told = [
        f"{server}, its steps measured by kvsim calibrate in {measured.seconds:.0f} s with a model of "
        f"{model.layers} layers, hidden size {model.hidden_size}.",
        f"{Quality.of(measured)}.",
        *note_lines(measured),
        "Errors of the model below, median and most:",
        *(f"{name:<9} {line}" for name, line in error_lines(fits, found)),
    ]
    return "\n".join(f"# {line}" for one in told for line in wrap(one, WIDTH))


def note_lines(measured: Measurements) -> list[str]:
    """Return the first notes of the client, a line each, and how many more there are."""
    more = len(measured.notes) - NOTES
    return [*(" ".join(note.split()) for note in measured.notes[:NOTES]), *([f"and {more} further notes"] if more > 0 else [])]


def error_lines(fits: Sequence[Fit], found: Sequence[Point]) -> list[tuple[str, str]]:
    """Return a line for each form of the model: its errors on what was fitted, and on what was held out."""
    lines = []
    for one in fits:
        fitted, held_out = [one.summary(found, is_held_out=is_held_out) for is_held_out in (False, True)]
        told = [
            f"{errors.median:.1%} and {errors.most:.1%} of {errors.batches} batches {label}"
            for errors, label in ((fitted, "fitted"), (held_out, "held out"))
            if errors.batches
        ]
        lines.append((one.name, ", ".join(told) + (" (this file)" if one is fits[0] else "")))
    return lines


def comments(machine: str) -> dict[str, str]:
    """Return the comment of each setting: what was fitted, and what stays."""
    stays = f"As in hardware={machine}, not measured."
    return {field.name: FITTED.get(field.name, stays).replace("{machine}", machine) for field in fields(HardwareSpec)}


def print_fits(measured: Measurements, fits: Sequence[Fit], found: Sequence[Point], console: Console) -> None:
    """Print what was measured and what the machine takes for it, batch by batch, and the errors."""
    best = fits[0]
    table = list(zip(found, best.expected_s, best.errors, strict=True))
    for title, is_held_out in (("Fitted", False), ("Held out", True)):
        rows = [
            (
                point.reading.batch.label(),
                f"{point.reading.seconds * 1e3:.4g}",
                "" if isinf(point.reading.error) else f"± {point.reading.error:.1%}",
                f"{expected * 1e3:.4g}",
                f"{error:+.1%}",
            )
            for point, expected, error in table
            if point.reading.batch.is_held_out == is_held_out
        ]
        if rows:
            show(console, title, ["", "measured, ms", "", "model, ms", "error"], rows)
    console.print("Errors, median and most", style="bold")
    for name, line in error_lines(fits, found):
        console.print(f"  {name:<9} {line}", highlight=False, soft_wrap=True)
    console.print()
    spec = best.hardware
    parts = [
        ("matrix products, share of the peak", f"{spec.flops_efficiency:.3f}"),
        ("memory, share of the peak", f"{spec.memory_efficiency:.3f}"),
        *((name.removesuffix("_s").replace("_", " ") + ", µs", micro(getattr(spec, name))) for name in OVERHEADS),
    ]
    show(console, "Machine", ["", "fitted"], parts)
    for line in (str(Quality.of(measured)), *note_lines(measured)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
