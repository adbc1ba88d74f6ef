"""``kvsim train``: a model of which leaves to keep, for ``eviction=learned``."""

import shlex
from collections.abc import Sequence

from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text

from kvsim.commands.application import run_application
from kvsim.errors import NoEffect
from kvsim.plans.build import build_run
from kvsim.plans.construct import construct
from kvsim.report.summary import Table
from kvsim.report.table import print_summary
from kvsim.report.terminal import width_of
from kvsim.results.rates import count, percent
from kvsim.results.result import RunRecord
from kvsim.run.execute import load_trace, own_folder
from kvsim.settings.configuration import Asked, check_run_here, without_hydra
from kvsim.settings.sources import flags
from kvsim.settings.unused_settings import WITHOUT_EFFECT, given, keys_of
from kvsim.training.settings import TrainSettings
from kvsim.training.train import MODEL, train


def main(arguments: Sequence[str]) -> None:
    """Run the command with the arguments that follow its name."""
    run_application("train", start, arguments)


def start(asked: Asked) -> None:
    """Train, write the folder, print what came out. Raises UsageError."""
    check_run_here(asked)
    for name in WITHOUT_EFFECT["train"]:
        if key := given(keys_of(asked.overrides), name):
            raise NoEffect(key, "on kvsim train", "leave it out")
    settings = construct(TrainSettings, OmegaConf.to_container(asked.config.train, resolve=True), "train")
    own_flags = flags(asked.config.hydra.runtime.config_sources)
    words = list(asked.overrides)
    overrides = [word for word in words if not word.lstrip("+~").startswith("train.")]
    config, choices = without_hydra(asked.config)
    plan = build_run(config, command="replay", overrides=overrides, choices=choices)
    console = Console()
    with own_folder(plan, "train"), Console(stderr=True).status("loading the trace") as status:
        trace, _ = load_trace(plan)
        line = shlex.join(["kvsim", "train", *own_flags, *words])
        record = train(plan, trace, settings, line, say=status.update)
    print_training(record, console)
    console.print(f"\n{plan.output}: {MODEL} train.json", highlight=False)
    use = f"kvsim replay eviction=learned eviction.path={shlex.quote(str(plan.output / MODEL))}"
    console.print(use, highlight=False, soft_wrap=True)


def print_training(record: RunRecord, console: Console) -> None:
    """Print how well the model decides, and its hits where it was not trained."""
    width = width_of(console)
    console.print(Text("kvsim train", "bold"))
    lines = [
        f"Trained on {count(record['trained_requests'])} requests, tested on the {count(record['tested_requests'])} after them.",
        f"Of decisions held out in training, the model lets go what Belady would in {percent(record['agreement'])}, LRU in "
        f"{percent(record['lru_agreement'])}.",
    ]
    for line in lines:
        console.print(Text(line, "dim"), width=min(width, 100))
    if record["tested"]:
        rows: list[tuple[str, ...]] = [
            (one["policy"], percent(one["hit_rate"]), f"{one['us_per_request']:.0f} µs") for one in record["tested"]
        ]
        console.print()
        print_summary(
            Table("Hits of the requests after the training", ("policy", "hit rate", "per request"), rows), console, width
        )
