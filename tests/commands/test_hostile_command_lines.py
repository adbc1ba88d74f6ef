"""No command line, however hostile, ends with a traceback: exit code 0, or one line and exit code 2, and nothing left behind."""

import io
import os
import tempfile
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.cli import main
from kvsim.commands import calibrate
from kvsim.errors import UsageError
from kvsim.plans import substrate_choice as substrates
from kvsim.settings import catalog
from kvsim.settings.flags import FLAGS, SHORT
from tests.mutations import few, work_budget

LINES = int(os.environ.get("KVSIM_COMMAND_LINES", 6))

TINY = ("trace.sessions=2", "tiers.gpu.capacity=9000pages")
WITH_TINY = ("replay", "simulate", "saturate")
CONFIGURED = (*WITH_TINY, "curve", "validate", "calibrate")
OTHERS = (
    *("trace info", "trace convert trace.jsonl", "trace fetch x", "trace"),
    *("report", "policies", "help", "new", "new eviction"),
)


def words_in(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


SWEEPS = words_in("1,2 lru,fifo range(0,2) choice(a,b) glob(l*) glob(zz) shuffle(1,2) interval(0,1) null,1 [a],{b:1}")
PLAIN = words_in("""
    null true x 5 0 -1 1.5 0.5 1e-300 1e999 -1e400 nan inf -inf 1000000000000000000000000000000
    [] [1] [[a]] [null] [''] [nan] {} {a:1} {a:{b:[c]}} {engine:0,at_s:nan} [{}] [lru] [hit_rate,nope]
    ${nope} ${seed} ${output} ${trace} ${oc.env:NOT_SET} ${now:%Q} ${hydra:nope} ${oc.decode:'{'} ${ $
    ' '' " "" \\ ( ) a=b a:b a, , @ / .. . ~ * %s {0} é 'é' ½ 日本 '日本' 😀
    lru synthetic auto mooncake words vllm sglang_hicache h200 tiny nope /lru ../trace/words lru.yaml mine
    trace.jsonl conf file /dev/null - 1pages 9000pages 1GiB 1XiB unlimited auto 1e30GiB 0.5pages
    _target_ os.system kvsim.cli.main kvsim.policies.eviction.lru.LRU kvsim.policies.eviction.base.RankedEviction a.b
    all full job hydra layerwise hit_rate MULTIRUN RUN
""")
SPACED = ["", " ", "a b", "['lru x=1']", "\n", "'a\nb'", "\t", "'\t'", "\0", "'a\0b'", "\udcff", "'\udcff'", "\u202e"]
LONG = ["9" * 5000, "[" * 300, "'" + "a" * 300 + "'", "a/" * 3000, "a" * 9000]
VALUES = [*PLAIN, *SPACED, *LONG, *SWEEPS]
HYDRA = words_in("""
    hydra hydra.mode hydra.run.dir hydra.run hydra.sweep.dir hydra.sweep.subdir hydra.sweep hydra.job.name hydra.job
    hydra.job.chdir hydra.job.num hydra.job.env_set hydra.job.env_copy hydra.searchpath hydra.verbose hydra.launcher
    hydra.launcher._target_ hydra.sweeper hydra.sweeper._target_ hydra.sweeper.params hydra.sweeper.params.seed
    hydra.sweeper.max_batch_size hydra.callbacks hydra.callbacks.sweep hydra.callbacks.sweep._target_ hydra.callbacks.x
    hydra.help hydra.hydra_help hydra.runtime.cwd hydra.overrides.task hydra.hydra_logging.version hydra.runtime.choices
    hydra/sweeper hydra/launcher hydra/hydra_logging hydra/help hydra/env
""")
ODD_KEYS = words_in("""
    a a.b trace[0] tiers.gpu[0] .seed seed. seed..x seed.x _self_ defaults _target_ /eviction eviction@ @eviction
    eviction@tiers.gpu.eviction eviction@tiers.gpu eviction@_global_ model@foo eviction/lru placement@tiers.cpu.placement sèed
    tiers.cup eviction:eviction preset@x eviction._target_ eviction.protected_hits trace._target_ trace.path trace.prompts
    trace.limit logger._target_ model.path rules._target_ hardware.gpus trace.rate model._target_ tiers tiers.gpu sweep curve
    cluster
""")
SPACED_KEYS = ["", " ", "\0", "optional eviction", "override eviction"]


def keys() -> list[str]:
    """Every setting of a run and of the choices, every group, Hydra's, and some that are none."""
    found = [setting.key for setting in (*catalog.run_settings(), *catalog.run_settings("calibrate"))]
    found += [
        setting.key for group in catalog.GROUPS for name in catalog.choices(group) for setting in catalog.settings_of(group, name)
    ]
    return list(dict.fromkeys([*found, *catalog.GROUPS, *HYDRA, *ODD_KEYS, *SPACED_KEYS]))


TEXTS = st.text(max_size=12) | st.text("[]{}()'\"\\,=:@~+$/. \t\n\0ab1-", max_size=12)
OVERRIDES = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "", "", "", "+", "++", "~"]),
    st.sampled_from(keys()),
    st.sampled_from(["=", "=", "=", "=", "=", ""]),
    st.sampled_from(VALUES) | TEXTS,
)
TRACEBACK = "--traceback"
SILENT_FLAGS = [flag for flag in (*FLAGS, *SHORT) if flag != TRACEBACK]
FLAG_WORDS = st.sampled_from(
    [*SILENT_FLAGS, "-x", "--", "-", "--cfg=job", "--cfg=all", "--package=tiers", "--package=[", "--package=a..b"]
)
WORDS = OVERRIDES | OVERRIDES | OVERRIDES | TEXTS | FLAG_WORDS | st.sampled_from(VALUES)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(CONFIGURED * 3 + OTHERS)).split()
    tiny = TINY if command[0] in WITH_TINY else TINY[:1] if command[0] == "curve" else ()
    words = draw(st.lists(WORDS, min_size=1, max_size=3))
    sweeps = [word for word in words if word.partition("=")[2] in SWEEPS]
    words = [word for word in words if word not in (TRACEBACK, *sweeps[1:])]  # few jobs
    multirun = ["-m"] if command[0] in CONFIGURED and draw(st.integers(0, 4)) == 0 else []
    given = {word.lstrip("+~").partition("=")[0] for word in words}
    kept = [word for word in tiny if word.partition("=")[0] not in given]
    is_other_trace = any(key == "trace" or key.startswith(("trace.path", "trace.prompts")) for key in given)
    return [*command, *multirun, *(word for word in kept if not (is_other_trace and word.startswith("trace."))), *words]


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would measure or use real hardware ends where it would begin, and standard input is empty."""

    def end(*arguments: Any) -> None:
        raise UsageError("no machine here")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(calibrate, "check_file", end)
    hardware = substrates.SUBSTRATES["hardware"]
    monkeypatch.setitem(substrates.SUBSTRATES, "hardware", replace(hardware, open=end))


@few(LINES)
@given(words=command_lines())
def test_no_command_line_ends_with_a_traceback(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as name, chdir(name), work_budget():
        Path("conf/eviction").mkdir(parents=True)
        Path("conf/eviction/mine.yaml").write_text("_target_: kvsim.policies.eviction.lru.LRU\n")
        Path("trace.jsonl").write_text('{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1]}\n')
        Path("file").touch()
        before = files()
        capfd.readouterr()  # the end of what an earlier command has shown
        code = main(words)
        shown = capfd.readouterr()
        is_sweep = any(word in ("-m", "--multirun") or "hydra.mode" in word for word in words)
        assert code in (0, 2), shown.err
        lines = shown.err.splitlines()
        assert all(line.startswith(("kvsim: ", "  job ", "  jobs ") if is_sweep else "kvsim: ") for line in lines), shown.err
        if not is_sweep:
            assert len(lines) == (code == 2), shown.err
        if code == 2 and not is_sweep:
            assert shown.out == ""
            assert files() == before


def files() -> list[Path]:
    """All files and folders here."""
    return sorted(Path().rglob("*"))
