"""``kvsim validate server=URL`` and ``results=FILE``: simulations beside runs against a server, and the folder of all.

The command and the Python API call it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from kvsim.core.request import Request
from kvsim.errors import UsageError
from kvsim.hardware.spec import HardwareSpec
from kvsim.model.spec import ModelSpec
from kvsim.plans.build import build_shape
from kvsim.plans.construct import construct
from kvsim.plans.plan import Plan
from kvsim.report.folder import prepare_folder
from kvsim.report.servers.measures import preemptions, succeeded, tells_hits, tokens_by_medium
from kvsim.report.servers.page import render_server
from kvsim.report.servers.scores import Compared, score
from kvsim.report.servers.seen import REJECTED, among_all, as_observed, moments_of
from kvsim.report.servers.series import series
from kvsim.report.validation.validation import write_validation
from kvsim.results.fields import SCHEMA
from kvsim.results.observed import ObservedRun, ServerFacts
from kvsim.results.observed_file import write_observed
from kvsim.results.result import RunRecord, plain, warmup_requests
from kvsim.run.execute import Watch, load_trace, unwatched
from kvsim.run.observed_order import replay_observed
from kvsim.run.play import check_answers, check_capacity, with_known_answers
from kvsim.run.validation_runs import SIMULATED, run_plans, simulations
from kvsim.servers.play import play_server, read_facts
from kvsim.servers.prompts import as_sent
from kvsim.servers.results.formats import facts_of, read_results, result_files
from kvsim.servers.settings import ServerSettings
from kvsim.servers.simulated import as_played, only, overrides_of
from kvsim.settings.configuration import compose, quoted
from kvsim.settings.unused_settings import given, keys_of

CHOOSING = ("server", "results")
"""Settings that choose runs against a server in place of runs on this machine."""
ADDRESS = "server.url"
"""What ``server=URL`` is short for."""
PLAIN = re.compile(r"[\w./:@%+-]+")
RUNS = "runs"
"""The folder of the real runs."""
DEFAULT_RUNS = "validate.runs=3"


@dataclass(frozen=True)
class Source:
    """Where real runs come from: a server or files."""

    server: ServerSettings | None
    files: Sequence[Path]
    facts: ServerFacts | None
    notes: Sequence[str] = ()


def is_against_server(words: Sequence[str]) -> bool:
    """Whether overrides choose runs against a server, or results of one."""
    return any(given(keys_of(words), name) for name in CHOOSING)


def expanded(word: str) -> str:
    """Return an override as Hydra reads it: ``server=URL`` and ``results=FILE,FILE`` are short forms."""
    key, _, value = word.partition("=")
    if key == "server" and value:
        return f"{ADDRESS}={readable(_unquoted(value))}"
    if key == "results" and value not in ("", "null") and not value.startswith("["):
        return f"results=[{','.join(map(readable, _unquoted(value).split(',')))}]"
    return word


def _unquoted(value: str) -> str:
    """Return the text that a value stands for, which may be quoted as Hydra reads it: so come the keywords of Python."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return re.sub(r"\\(['\"\\])", r"\1", value[1:-1]) if is_quoted else value


def readable(text: str) -> str:
    """Return a text as Hydra reads it, quoted only if it must be."""
    return text if PLAIN.fullmatch(text) else quoted(text)


def source_of(words: Sequence[str]) -> Source:
    """Return where the runs of some overrides come from, with what the server says of itself. Raises UsageError."""
    config: Any = OmegaConf.to_container(compose(words), resolve=False)
    node, names = config["server"], config["results"]
    if names:
        if key := given(keys_of(words), "server"):
            raise UsageError(f"{key} has no effect on runs that have been recorded: leave it out, or results")
        if key := given(keys_of(words), "validate.runs"):
            raise UsageError(f"{key} has no effect with results: leave it out")
        files = result_files([Path(str(name)) for name in ([names] if isinstance(names, str) else names)])
        if twice := [file for file in files if [other.resolve() for other in files].count(file.resolve()) > 1]:
            raise UsageError(f"results: {twice[0]} is named twice: name each file once")
        return Source(None, files, facts_of(files[0]))
    if not isinstance(node, dict) or node.get("url") is None:
        raise UsageError("server.url is missing: set server=URL, such as server=http://localhost:8000, or results=FILE")
    settings = construct(ServerSettings, node, "server")
    return Source(settings, (), read_facts(settings))


def asked_of(words: Sequence[str], before: Sequence[str] = ()) -> tuple[Source, list[str]]:
    """Return where the runs of some overrides come from, and the overrides that this adds: how the server is simulated.

    ``before`` are overrides that come first. Raises UsageError.
    """
    source = source_of([*before, *words])
    is_repeated = source.server is not None and source.server.reset
    more = [DEFAULT_RUNS] if is_repeated and not given(keys_of(words), "validate.runs") else []
    if source.facts is not None:
        found, notes = overrides_of(source.facts, [*before, *words], shape_of)
        source, more = replace(source, notes=notes), more + found
    return source, more


def shape_of(overrides: Sequence[str]) -> tuple[ModelSpec, HardwareSpec]:
    """Return the model and the machine that overrides describe. Raises UsageError."""
    return build_shape(compose(overrides), overrides)


def validate_server(
    plan: Plan, source: Source, command_line: str | None, *, watch: Callable[[str], Watch] = lambda label: unwatched
) -> RunRecord:
    """Play or read the real runs, simulate, score, and write the folder, which the caller has locked.

    ``watch`` takes what a run is called. Returns the content of ``validate.json``. Raises UsageError.
    """
    if source.server is not None and not source.server.reset and plan.validation.runs > 1:
        raise UsageError("server.reset=false leaves what one run has cached to the next one: set validate.runs=1")
    trace, _ = load_trace(plan)
    sent = as_sent(trace.requests, plan.page_tokens)
    check_requests(plan, sent)
    real = play(plan, source.server, trace.requests, watch) if source.server else read_results(source.files, sent)
    for number, run in enumerate(real, 1):
        if not succeeded(run).any():
            raise UsageError(f"run {number} ({run.source}): {run.failures()}")
    check_alike(plan, real)
    answered, other_answers = as_answered(trace.requests, real[0])
    played, note = as_played(as_sent(answered, plan.page_tokens), real[0])
    was_served = np.logical_or.reduce([succeeded(run) for run in real])
    own = replace(trace, requests=only(played, was_served.tolist()))
    results = run_plans(plan, SIMULATED, simulations(plan, len(real)), command_line, own, watch=watch)
    given, untold = replays(plan, trace.requests, real)
    runs = Compared(
        real=real,
        given=given,
        simulated=[among_all(as_observed(result.outcome, SIMULATED), was_served) for result in results],
        skipped=warmup_requests(plan.warmup, len(sent)),
    )
    check_compared(runs)
    notes = [f"{line[:1].upper()}{line[1:]}." for line in source.notes]
    notes += [line for line in (note, other_answers, own.note, untold, counters_note(runs)) if line]
    record = described(plan, runs, source.facts or real[0].facts, results[0].record, notes, command_line)
    if not record["checks"]:
        raise UsageError("the runs say neither what requests found nor when first tokens came: there is nothing to compare")
    write_validation(plan.output, record, render_server(record))
    return record


def as_answered(requests: Sequence[Request], run: ObservedRun) -> tuple[list[Request], str]:
    """Return requests with answers as long as in a run, and a line if these are not the trace's.

    Where the run has failed, or says nothing of an answer, the trace's length stays.
    """
    expected = np.array([request.output_tokens for request in requests], dtype=np.int64)
    lengths = np.where(succeeded(run) & (run.output_tokens > 0), run.output_tokens, expected)
    different = np.abs(lengths - np.maximum(expected, 1)) * (lengths != expected)
    if not different.any():
        return list(requests), ""
    number, most = np.count_nonzero(different), different.max()
    note = f"{number} answers are not as long as in the trace, by up to {most} tokens: simulated as long as in the first run."
    pairs = zip(requests, lengths.tolist(), strict=True)
    return [replace(request, output_tokens=tokens) for request, tokens in pairs], note


def check_requests(plan: Plan, sent: list[Request]) -> None:
    """Raise UsageError for requests that cannot be simulated, before any is sent."""
    check_answers(with_known_answers(plan, sent), sent)
    check_capacity(plan, sent)


def play(plan: Plan, settings: ServerSettings, requests: Sequence[Request], watch: Callable[[str], Watch]) -> list[ObservedRun]:
    """Play the trace against the server, as often as is asked for, and save each run when it has ended. Raises UsageError."""
    folder, number_of = plan.output / RUNS, plan.validation.runs
    if found := sorted(folder.glob("*.jsonl.gz")):
        raise UsageError(
            f"output: {found[0]} is a run of another validation: choose another folder with output=DIR, or compare it again with "
            f"results={folder}"
        )
    prepare_folder(folder)
    runs = []
    for number in range(1, number_of + 1):
        with watch(f"{settings.url} {number}/{number_of}")(len(requests)) as advance:
            run = play_server(requests, plan.page_tokens, settings, advance or (lambda done: None))
        write_observed(folder / f"{number}.jsonl.gz", run)
        runs.append(run)
    return runs


def replays(plan: Plan, requests: Sequence[Request], real: Sequence[ObservedRun]) -> tuple[list[ObservedRun], str]:
    """Return a replay of each real run, in its order of admission, and a line on requests of which that is not known.

    None is replayed if the server does not tell what requests found, or of some run no admission is known.
    """
    if not all(map(tells_hits, real)):
        return [], ""
    moments = [moments_of(run) for run in real]
    untold = [succeeded(run) & np.isnan(one.admitted_s) for run, one in zip(real, moments, strict=True)]
    if any((one == succeeded(run)).all() for run, one in zip(real, untold, strict=True)):
        return [], "Nothing is replayed in the server's order: a run has neither times in the queue nor first tokens."
    answered = [as_sent(as_answered(requests, run)[0], plan.page_tokens) for run in real]
    given = [as_observed(replay_observed(plan, *pair), "replayed") for pair in zip(answered, moments, strict=True)]
    numbers = [int(one.sum()) for one in untold]
    left_out = f"Not replayed, without a time in the queue and a first token: {', '.join(map(str, numbers))}."
    return given, left_out if any(numbers) else ""


def check_alike(plan: Plan, real: Sequence[ObservedRun]) -> None:
    """Raise UsageError if runs, as far as they tell, are of servers that are simulated differently, or of different loads."""
    first = real[0]
    for number, run in enumerate(real[1:], 2):
        pairs = [(_load(first), _load(run))] if run.client == first.client else []
        if first.facts is not None and run.facts is not None:
            pairs.append((_server(plan, first.facts), _server(plan, run.facts)))
        for one, other in pairs:
            for key in {**one, **other}:
                if one.get(key) != other.get(key):
                    raise UsageError(
                        f"results: {key} is {one.get(key)} in the first run, but {other.get(key)} in run {number}: compare runs "
                        "of one server and load"
                    )


def _load(run: ObservedRun) -> dict[str, Any]:
    return {"server.speed": run.speed, "server.concurrency": run.concurrency}


def _server(plan: Plan, facts: ServerFacts) -> dict[str, Any]:
    """Return what of a server is simulated, with the model and the machine of the plan."""
    found, _ = overrides_of(facts, (), lambda overrides: (plan.model, plan.hardware))
    return {"engine": facts.engine, **dict(line.split("=", 1) for line in found)}


def counters_note(runs: Compared) -> str:
    """Return a line on what counters measure that does not leave out the warm-up; empty if there is nothing of the kind."""
    counted = [not run.tier_tokens and tokens_by_medium(run, succeeded(run)) for run in runs.real]
    if not runs.skipped or not any(counted):
        return ""
    what = "Cached tokens by medium are" if all(map(tells_hits, runs.real)) else "Hit rates and cached tokens by medium are"
    return f"{what} of whole runs, with the warm-up: they are the server's counters."


def check_compared(runs: Compared) -> None:
    """Raise UsageError if there is no request to compare."""
    if not runs.counted(*runs.real, *runs.simulated).any():
        after = f" after the warm-up of {runs.skipped} requests" if runs.skipped else ""
        raise UsageError(f"no request succeeded in all runs and simulations{after}: there is nothing to compare")


def described(
    plan: Plan, runs: Compared, facts: ServerFacts | None, simulated: RunRecord, notes: Sequence[str], command_line: str | None
) -> RunRecord:
    """Return the content of ``validate.json``."""
    record = {
        "schema": SCHEMA,
        "command": "validate",
        "command_line": command_line,
        **{name: simulated[name] for name in ("config", "choices", "versions", "seed")},
        "server": None if facts is None else asdict(facts),
        "runs": [_about(run) for run in runs.real],
        "simulations": len(runs.simulated),
        "rejected": list(runs.simulated[0].errors).count(REJECTED),
        "notes": list(notes),
        **score(runs, plan.validation),
        **series(runs),
    }
    return {name: plain(value) for name, value in record.items()}


def _about(run: ObservedRun) -> dict[str, Any]:
    failed = len(run.errors) - int(succeeded(run).sum())
    reasons = [f"{run.failures()}."] * bool(failed)
    return {
        "source": run.source,
        "client": run.client,
        "failed": failed,
        "preemptions": preemptions(run),
        "late_s": run.late_s(),
        "notes": [*(f"{note[:1].upper()}{note[1:]}." for note in run.notes), *reasons],
    }
