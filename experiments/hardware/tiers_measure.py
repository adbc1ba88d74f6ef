"""Serves the configurations of tiers_draw.py on this machine's GPU, several times each, and packs what was measured.

The machine first calibrates itself, once for each model (``kvsim calibrate``, about five minutes). Then the configurations of
the part are served in rounds: the first run of each, the second of each, and so on, so that the runs of a configuration are
minutes apart. What has been calibrated or served in ``--folder`` on this machine, since it was started, is not repeated.

    python experiments/hardware/tiers_measure.py --part 1/3 --seconds 570 --output DIR

``--part K/N`` takes one of N parts, each of which needs one calibration: the last has the configurations of the hybrid model, the
others share the rest. Without it, all are served. ``--seconds`` is the time after which nothing is begun that would not end in
time; what is there is kept. DIR gets ``MACHINE-K-of-N.tar.xz``, written anew after every run: the descriptions of the machine,
and result.json and requests.csv.gz of each run. Put it into experiments/hardware/tiers_recorded, for tiers.py.

Exits with 0 if all runs of the part were made, with 1 if some are missing.
"""

import argparse
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from kvsim.cli import main as kvsim
from kvsim.files.writing import replacing

HERE = Path(__file__).resolve().parent
CONFIGURATIONS = HERE / "tiers_configurations.json"
RUNS = 3
CALIBRATION_S = 320.0
"""Seconds that a calibration takes on an H200, roughly."""
SET_UP_S = 8.0
"""Seconds that a machine needs to prepare a run, roughly, until it has been seen."""
SPARE = 1.15
"""What is expected of a run is multiplied by this."""
RECORDED = ("requests.csv.gz", "result.json")


@dataclass(frozen=True)
class Configuration:
    """What is served."""

    name: str
    overrides: list[str]
    simulated_s: float

    @property
    def model(self) -> str:
        """The model's name."""
        return next(word.removeprefix("model=") for word in self.overrides if word.startswith("model="))


def read_configurations(path: Path) -> list[Configuration]:
    """Return all that was drawn into a file."""
    drawn = json.loads(path.read_text())["drawn"]
    return [Configuration(one["name"], one["overrides"], one["simulated_s"]) for one in drawn]


def part_of(configurations: Sequence[Configuration], part: int, parts: int) -> list[Configuration]:
    """Return a part, from 1 on: the last has those of the model with the fewest, the others deal out the rest in turn."""
    models = [one.model for one in configurations]
    rare = min(dict.fromkeys(models), key=models.count)
    if parts == 1:
        return list(configurations)
    if len(set(models)) == 1:
        return list(configurations[part - 1 :: parts])
    others = [one for one in configurations if one.model != rare]
    return [one for one in configurations if one.model == rare] if part == parts else others[part - 1 :: parts - 1]


class Session:
    """What this machine does in the time that it has."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.machine = machine_name()
        self.folder = folder / self.machine
        self.ends = monotonic() + seconds
        self.set_up_s = SET_UP_S
        self.failed: set[str] = set()
        """Models whose calibration has failed."""
        (self.folder / "hardware").mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        return self.ends - monotonic()

    def calibrate(self, model: str) -> bool:
        """Calibrate with a model unless that has been done. Return False if the time or the calibration does not suffice."""
        name = f"measured_{model}"
        if (self.folder / "hardware" / f"{name}.yaml").exists():
            return True
        if model in self.failed or self.left_s < CALIBRATION_S:
            return False
        words = [f"name={name}", f"model={model}", f"output={self.folder / 'hardware'}", f"disk={self.folder}"]
        began = monotonic()
        path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "kvsim", "calibrate", *words]  # a process of its own, so that it leaves no memory in use
        code = subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": path}).returncode
        print(f"calibrate {model}: {monotonic() - began:.0f} s, exit code {code}", flush=True)
        if code:
            self.failed.add(model)
        return code == 0

    def run(self, one: Configuration, number: int) -> bool:
        """Serve a configuration unless that has been done. Return whether the run is there."""
        output = self.folder / "runs" / one.name / str(number)
        if (output / "result.json").exists():
            return True
        expected_s = SPARE * (self.set_up_s + one.simulated_s)
        if self.left_s < expected_s or not self.calibrate(one.model):
            print(f"{one.name}, run {number}: {self.left_s:.0f} s are left, {expected_s:.0f} expected", flush=True)
            return False
        began = monotonic()
        described = [f"hardware=measured_{one.model}", "--config-dir", str(self.folder)]
        code = attempted(["simulate", "substrate=hardware", *one.overrides, *described, f"output={output}"])
        took_s = monotonic() - began
        self.set_up_s = max(self.set_up_s, took_s - one.simulated_s) if code == 0 else self.set_up_s
        print(f"{one.name}, run {number}: {took_s:.1f} s, exit code {code}", flush=True)
        return (output / "result.json").exists()

    def pack(self, path: Path) -> None:
        """Write the machine's descriptions and runs to an archive, which depends on nothing but their content."""
        runs = (file for name in RECORDED for file in self.folder.glob(f"runs/*/*/{name}"))
        with replacing(path) as packed, tarfile.open(fileobj=packed, mode="w:xz", preset=2) as archive:
            for file in sorted([*self.folder.glob("hardware/*.yaml"), *runs]):
                member = tarfile.TarInfo(str(file.relative_to(self.folder.parent)))
                member.size = file.stat().st_size
                with file.open("rb") as content:
                    archive.addfile(member, content)


def attempted(words: list[str]) -> int:
    """Run a command of kvsim and return its exit code; 1, with the calls, if it breaks: the other configurations go on."""
    try:
        return kvsim(words)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        gc.collect()


def machine_name() -> str:
    """Return a name that a machine has until it is started again: its device, and a digest of what identifies it.

    The driver's command is asked, not torch, which would start CUDA before kvsim has set what it needs.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return "no_gpu"
    query = [command, "--query-gpu=name,uuid", "--format=csv,noheader", "--id=0"]
    device, identity = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip().rsplit(", ", 1)
    started = Path("/proc/sys/kernel/random/boot_id").read_text()
    digest = hashlib.sha256(f"{identity} {started}".encode()).hexdigest()[:8]
    kind = "".join(letter if letter.isalnum() else "_" for letter in device.lower().removeprefix("nvidia "))
    return f"{kind}_{digest}"


def serve(session: Session, configurations: Sequence[Configuration], runs: int, archive: Path) -> Iterator[bool]:
    """Serve all configurations in rounds; yield for each run whether it is there."""
    for number in range(1, runs + 1):
        for one in configurations:
            yield session.run(one, number)
            session.pack(archive)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", metavar="K/N", help="one of N parts; default: all")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these configurations, of all parts")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of each configuration")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing that would end later")
    parser.add_argument("--configurations", type=Path, default=CONFIGURATIONS, help="file of tiers_draw.py")
    parser.add_argument("--folder", type=Path, default=Path("outputs") / "tiers", help="folder of calibrations and runs")
    parser.add_argument("--output", type=Path, default=HERE / "tiers_recorded", help="folder of the archive")
    options = parser.parse_args(arguments)
    try:
        options.part, options.parts = (int(number) for number in options.part.split("/"))
    except ValueError:
        parser.error("--part: write K/N, such as 1/3")
    if not 1 <= options.part <= options.parts:
        parser.error("--part: K must be from 1 to N")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    configurations = read_configurations(options.configurations)
    if unknown := set(options.only) - {one.name for one in configurations}:
        sys.exit(f"--only: there is no configuration {sorted(unknown)[0]}")
    chosen = [one for one in configurations if one.name in options.only] or part_of(configurations, options.part, options.parts)
    options.output.mkdir(parents=True, exist_ok=True)
    session = Session(options.folder, options.seconds)
    archive = options.output / f"{session.machine}-{options.part}-of-{options.parts}.tar.xz"
    made = list(serve(session, chosen, options.runs, archive))
    print(f"{archive}: {sum(made)} of {len(made)} runs", flush=True)
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
