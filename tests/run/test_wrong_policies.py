"""A user's policy that is wrong ends a run with one line that names it and what it did, exit code 2, and no file."""

import sys
from pathlib import Path

import pytest

from kvsim.cli import main
from kvsim.installation import is_compiled

TIERS = ("tiers.gpu.capacity=6000pages", "tiers.cpu.capacity=9000pages", "tiers.disk.capacity=20000pages")
FAMILIES = {
    "eviction": ("from kvsim.policies.eviction.lru import LRU as Base", ()),
    "bound": ("from kvsim.policies.eviction.belady import Belady as Base", ()),
    "placement": ("from kvsim.policies.placement.write_through import WriteThrough as Base", ()),
    "prefetch": (
        "from kvsim.policies.prefetch.threshold import ThresholdPrefetch as Base",
        ("placement=write_back", "tiers.cpu.capacity=2000pages"),
    ),
    "checkpoint": (
        "from kvsim.policies.checkpoint.last import Last as Base",
        ("model=nemotron_h_8b", "tiers.gpu.capacity=40GiB", "tiers.cpu.capacity=0", "tiers.disk.capacity=0"),
    ),
    "scheduling": ("from kvsim.policies.scheduling.shortest_prompt import ShortestPrompt as Base", ()),
    "admission": ("from kvsim.policies.admission.queue_limit import QueueLimit as Base", ()),
    "autoscaling": (
        "from kvsim.policies.autoscaling.target_utilization import TargetUtilization as Base",
        ("cluster.engines=2", "tiers.gpu.capacity=20000pages"),
    ),
}
"""A policy to derive a wrong one from, and settings of a run that asks it everything."""

PLACEMENT = "the placement policy of the cpu tier, Mine, returned "
PREFETCH = "the prefetch policy Mine returned "
CHECKPOINT = "the checkpoint policy Mine returned "
SCHEDULING = "the scheduling policy Mine returned "
AUTOSCALING = "the autoscaling policy Mine returned "
ADMISSION = "the admission policy Mine returned "
OF_GPU = "the eviction policy of the gpu tier, Mine, "
WRONG = [
    ("eviction", "def victims(self, now): return []", f"{OF_GPU}offered too few victims: "),
    ("eviction", "def victims(self, now): return 'ab'", f"{OF_GPU}offered 'a', which is not a node"),
    (
        "eviction",
        "def variant(self): pass",
        "the eviction policy Mine returned None from variant(), not an eviction policy: is a",
    ),
    (
        "placement",
        "def after_use(self, node, now): pass",
        f"{PLACEMENT}None from after_use(), not True or False: is a return missi",
    ),
    ("placement", "def wanted_pages(self, request, path, now): return request.prompt_tokens", f"{PLACEMENT}"),
    ("placement", "watermark = 1.5", f"{PLACEMENT}1.5 from watermark, not a number of at least 0 and at most 1"),
    ("prefetch", "def fetch(self, offer): return 16 * offer.stored_pages", f"{PREFETCH}"),
    ("prefetch", "def load(self, request, *pages): return sum(pages) + 1", f"{PREFETCH}"),
    ("checkpoint", "def after_prefill(self, prefill): return [16 * prefill.full]", f"{CHECKPOINT}"),
]
"""An answer of each kind to each question; test_answers.py has all that is no answer."""
WITH_A_CLOCK = [
    (
        "prefetch",
        "def wait_s(self, fetch_tokens): pass",
        f"{PREFETCH}None from wait_s(), not a number of at least 0: is a return",
    ),
    ("autoscaling", "def engines(self, status): pass", f"{AUTOSCALING}None from engines(), not a whole number of at least 0: is"),
    ("autoscaling", "def engines(self, status): return -1", f"{AUTOSCALING}-1 from engines(), not a whole number of at least 0"),
    ("autoscaling", "asked_every_s = 0", f"{AUTOSCALING}0 from asked_every_s, not a number of at least 0.001"),
    (
        "admission",
        "def admits(self, request, load): pass",
        f"{ADMISSION}None from admits(), not True or False: is a return missing",
    ),
    ("admission", "goes_by = 'host'", f"{ADMISSION}'host' from goes_by, not engine or cluster"),
    ("scheduling", "def rank(self, waiting): return 10**400", f"{SCHEDULING}1{'0' * 199}... from rank(), not a number"),
    ("scheduling", "def order(self, round): return []", f"{SCHEDULING}0 of 1 waiting requests from order(): it must return all"),
    (
        "scheduling",
        "def order(self, round): return 2 * list(round.waiting)",
        f"{SCHEDULING}Waiting(request=0) from order(), not a waiting request that it has not returned before",
    ),
    (
        "scheduling",
        "def bind(self, context): self.max_wait_s = -1",
        f"{SCHEDULING}{float(-1) if is_compiled() else -1} from max_wait_s, not a number of at least 0",
    ),
]
COMMANDS = ("replay", "simulate")
CASES = [(COMMANDS[at % 2], *wrong) for at, wrong in enumerate(WRONG)] + [("simulate", *wrong) for wrong in WITH_A_CLOCK]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def write_policy(folder: Path, family: str, body: str) -> list[str]:
    """A policy of the user's own: a module and its YAML. Returns the settings of a run with it."""
    base, settings = FAMILIES[family]
    (folder / "mine.py").write_text(f"{base}\n\n\nclass Mine(Base):\n    {body}\n")
    family = "eviction" if family == "bound" else family
    (folder / "conf" / family).mkdir(parents=True)
    (folder / "conf" / family / "mine.yaml").write_text("_target_: mine.Mine\n")
    return [*TIERS, *settings, "trace.sessions=20", f"{family}=mine", "output=out", "--config-dir", "conf"]


@pytest.mark.parametrize(("command", "family", "body", "expected"), CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def test_a_wrong_policy_ends_with_one_line(
    command: str, family: str, body: str, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *write_policy(folder, family, body)]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"kvsim: {expected}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert sorted(path.name for path in folder.iterdir()) == ["conf", "mine.py"]


RIGHT = [
    ("placement", "def after_use(self, node, now): return __import__('numpy').bool_(node.hits > 1)"),
    ("prefetch", "def fetch(self, offer): return __import__('numpy').int64(offer.stored_pages)"),
    ("checkpoint", "def after_prefill(self, prefill): return __import__('numpy').array([prefill.full, 0, prefill.known])"),
]
RIGHT_WITH_A_CLOCK = [
    ("scheduling", "def rank(self, waiting): return __import__('numpy').float32(-waiting.arrival_s)"),
    ("scheduling", "def order(self, round): return reversed(round.waiting)"),
]
RIGHT_CASES = [(COMMANDS[at % 2], *right) for at, right in enumerate(RIGHT)]
RIGHT_CASES += [("simulate", *right) for right in RIGHT_WITH_A_CLOCK]


@pytest.mark.parametrize(("command", "family", "body"), RIGHT_CASES, ids=[f"{case[0]}-{case[2]}" for case in RIGHT_CASES])
def test_an_answer_may_be_a_list_or_of_numpy(command: str, family: str, body: str, folder: Path) -> None:
    assert main([command, *write_policy(folder, family, body)]) == 0
    assert (folder / "out" / "result.json").exists()


FAILING = [
    ("eviction", "def victims(self, now):\n        yield from [] if now < 0 else [1 / 0]", "ZeroDivisionError: division by zero"),
    ("eviction", "def rank(self, node): raise SystemExit(3)", "SystemExit: 3"),
    ("eviction", "def rank(self, node): raise ValueError('two\\nlines')", "ValueError: two lines"),
    ("eviction", "def rank(self, node): return self.rank(node)", "RecursionError: maximum recursion depth exceeded"),
    ("checkpoint", "def after_prefill(self, prefill): raise GeneratorExit", "GeneratorExit"),
]


@pytest.mark.parametrize(("family", "body", "problem"), FAILING, ids=[case[1] for case in FAILING])
def test_an_error_inside_a_policy_names_its_class_and_its_line(
    family: str, body: str, problem: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([COMMANDS[len(problem) % 2], *write_policy(folder, family, body)]) == 2
    shown = capfd.readouterr().err
    line = 5 + body.count("\n")
    method = body.partition("(")[0].removeprefix("def ")
    assert shown.startswith(f"kvsim: the {family} policy") and f"Mine.{method}: {problem}" in shown
    assert f" failed at mine.py:{line}, in Mine." in shown
    assert shown.endswith("; --traceback shows the calls\n") and shown.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["conf", "mine.py"]


def test_the_calls_that_led_to_an_error_are_shown_on_demand(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = write_policy(folder, "eviction", "def rank(self, node): return 1 / 0")
    assert main(["simulate", *settings, "--traceback"]) == 2
    *calls, line = capfd.readouterr().err.splitlines()
    assert f'  File "{folder}/mine.py", line 5, in rank' in calls
    assert line.startswith("kvsim: the eviction policy of the gpu tier, Mine, failed at mine.py:5")


BREACHES = [
    (
        "eviction",
        "def bind(self, context): pass",
        "AttributeError: attribute '_offered'" if is_compiled() else "AttributeError: 'Mine' object has no attribute",
    ),
    ("eviction", "def victims(self): return []", "TypeError: Mine.victims() takes 1 positional argument but 2 were given"),
]


@pytest.mark.parametrize(("family", "body", "problem"), BREACHES, ids=[case[1] for case in BREACHES])
def test_a_method_that_is_not_what_the_contract_says_names_its_class(
    family: str, body: str, problem: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([COMMANDS[len(problem) % 2], *write_policy(folder, family, body)]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith(f"kvsim: the {family} policy") and f"Mine, breaks its contract (mine.py): {problem}" in shown.replace(
        "policy Mine b", "policy, Mine, b"
    )
    assert shown.count("\n") == 1


@pytest.mark.skipif(is_compiled(), reason="compiled, a node refuses such values: the policy's own line fails")
@pytest.mark.parametrize("change", ["node.hits = None", "node.children = None"])
def test_a_policy_that_changes_a_node_is_named_although_kvsim_failed(
    change: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = write_policy(folder, "eviction", f"def rank(self, node):\n        {change}\n        return 1")
    assert main(["simulate", *settings]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith("kvsim: kvsim failed in a run with Mine of mine.py, which may change nothing but its own: ")
    assert shown.count("\n") == 1 and not (folder / "out").exists()


def test_an_interrupt_names_the_line_that_never_ended(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "def victims(self, now):\n        import signal\n        while True:\n            signal.raise_signal(signal.SIGINT)"
    assert main(["simulate", *write_policy(folder, "eviction", body)]) == 130
    assert capfd.readouterr().err == "kvsim: interrupted at mine.py:8, in Mine.victims\n"


MODULES = [
    ("def f(:\n", "mine.Mine cannot be imported: SyntaxError: invalid syntax (mine.py, line 1)"),
    ("x = 1\n1 / 0\n", "mine.Mine cannot be imported, at mine.py:2, in <module>: ZeroDivisionError: division by zero"),
    ("import not_there\n", "mine.Mine needs the module not_there, which is not installed"),
    ("class Mine: pass\n", "mine.Mine is not a subclass of EvictionPolicy"),
]


@pytest.mark.parametrize(("text", "expected"), MODULES, ids=[text for text, _ in MODULES])
def test_a_module_that_cannot_be_imported_is_named_with_its_line(
    text: str, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = write_policy(folder, "eviction", "")
    (folder / "mine.py").write_text(text)
    assert main(["replay", *settings]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith(f"kvsim: eviction._target_: {expected}") and shown.count("\n") == 1


def test_a_class_that_cannot_be_built_is_named_with_its_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = write_policy(folder, "eviction", "def __init__(self, **settings): raise KeyError('x')")
    assert main(["replay", *settings]) == 2
    expected = "kvsim: eviction: Mine cannot be built, at mine.py:5, in Mine.__init__: KeyError: 'x'; --traceback shows the calls"
    assert capfd.readouterr().err == f"{expected}\n"


def test_a_module_with_the_name_of_another_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = write_policy(folder, "eviction", "")
    (folder / "random.py").write_text("class Mine: pass\n")
    assert main(["replay", *settings, "eviction._target_=random.Mine"]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("kvsim: eviction._target_: random.Mine does not exist: random is /")
    assert shown.endswith("/random.py; rename your module\n")


@pytest.mark.parametrize(
    ("rules", "body", "expected"),
    [
        (["rules=sglang", "tiers.cpu.capacity=9000pages"], "def victims(self, now): return []", "offered too few victims: "),
        (
            ["rules=vllm"],
            "def victims(self, now): return 2 * [next(super().victims(now))]",
            "offered a node that cannot leave, Node(",
        ),
    ],
)
def test_the_rules_of_engines_refuse_wrong_victims(
    rules: list[str], body: str, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [*write_policy(folder, "eviction", body), "tiers.gpu.capacity=4000pages", "tiers.disk.capacity=0"]
    assert main(["replay", *settings, "tiers.cpu.capacity=0", *rules]) == 2
    assert capfd.readouterr().err.startswith(f"kvsim: the eviction policy of the gpu tier, Mine, {expected}")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("hits + 0.5, kept", "from use() as hit pages, not a whole number"),
        ("None", "returned None from use(), not hit pages and kept pages: is a return missing?"),
        ("hits, kept + 10**6", "from use() as kept pages, not a whole number"),
    ],
)
def test_a_wrong_bound_ends_with_one_line(answer: str, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = f"def use(self, request):\n        hits, kept = super().use(request)\n        return {answer}"
    settings = write_policy(folder, "bound", body)
    assert main(["replay", *settings, "tiers.cpu.capacity=0", "tiers.disk.capacity=0"]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("kvsim: the eviction policy of the gpu tier, Mine, returned ") and expected in shown


OWN_KINDS = [
    ("from kvsim.errors import UsageError as E", "E('something')", "UsageError: something"),
    ("from kvsim.errors import TraceError as E", "E('file', 3, 'something')", "TraceError: file:3: something"),
    ("from kvsim.core.answers import PolicyError as E", "E('something')", "PolicyError: something"),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("imported", "raised", "said"), OWN_KINDS, ids=[case[2] for case in OWN_KINDS])
def test_an_error_of_kvsims_own_kinds_names_the_policy_too(
    imported: str, raised: str, said: str, command: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"def on_insert(self, node, now):\n        {imported}\n        raise {raised}"
    assert main([command, *write_policy(folder, "eviction", body)]) == 2
    shown = capfd.readouterr().err
    assert (
        shown.startswith("kvsim: the eviction policy of the ")
        and f"Mine, failed at mine.py:7, in Mine.on_insert: {said}" in shown
    )


def test_an_input_that_a_policy_lacks_is_still_said_in_its_own_words(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "def bind(self, context):\n        super().bind(context)\n        context.require('tenant', 'tenants')"
    assert main(["replay", *write_policy(folder, "eviction", body)]) == 2
    assert capfd.readouterr().err.startswith(
        "kvsim: eviction of the gpu tier: Mine needs tenants, which this trace does not have"
    )


@pytest.mark.parametrize("method", ["async def on_hit(self, node, now): pass", "async def on_remove(self, node): yield"])
def test_a_method_that_nobody_awaits_is_refused(method: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *write_policy(folder, "eviction", method)]) == 2
    assert "is async, and so would never run: define it without async" in capfd.readouterr().err


def test_a_part_of_a_page_cannot_leave(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = (
        "def victims(self, now):",
        "    for node in super().victims(now):",
        "        self.most_pages = 1.5",
        "        yield node",
    )
    body = "\n    ".join(lines)
    assert main(["replay", *write_policy(folder, "eviction", body)]) == 2
    assert "Mine" in (shown := capfd.readouterr().err) and ("1.5 from most_pages" in shown or "int object expected" in shown)


def test_kvsims_own_policy_is_not_blamed_for_what_another_policy_did(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "def after_use(self, node, now):\n        node.last_used = float('nan')\n        return True"
    assert main(["simulate", *write_policy(folder, "placement", body)]) in (1, 2)
    shown = capfd.readouterr().err
    assert "Mine of mine.py" in shown and "may change nothing but its own" in shown
    assert not shown.startswith("kvsim: the eviction policy")


@pytest.mark.parametrize(
    ("asks", "needed"), [("engines[0].used_pages", "needs_reports"), ("engines[0].cached_pages(request)", "needs_cached_pages")]
)
def test_a_router_that_reads_what_it_has_not_asked_for_is_named(
    asks: str, needed: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(
        "from kvsim.policies.routing.least_loaded import LeastLoaded\n\n\nclass Mine(LeastLoaded):\n"
        f"    def choose(self, request, engines, now): return engines[{asks} * 0].engine\n"
    )
    (folder / "conf" / "routing").mkdir(parents=True)
    (folder / "conf" / "routing" / "mine.yaml").write_text("_target_: mine.Mine\n")
    assert main(["simulate", "trace.sessions=5", "cluster.engines=2", "routing=mine", "--config-dir", "conf", "output=out"]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith("kvsim: the routing policy Mine ") and shown.endswith(f"it needs {needed} = True\n")


def test_a_key_of_a_policys_file_that_is_no_text_is_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = write_policy(folder, "eviction", "pass")
    (folder / "conf" / "eviction" / "mine.yaml").write_text("_target_: mine.Mine\n1: 2\n")
    assert main(["replay", *settings]) == 2
    assert capfd.readouterr().err.startswith("kvsim: eviction.1: there is no such setting")


def test_a_policy_that_goes_elsewhere_takes_no_output_with_it(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    body = f"def bind(self, context):\n        super().bind(context)\n        __import__('os').chdir('{folder}/elsewhere')"
    assert main(["replay", *write_policy(folder, "eviction", body), "-m", "seed=1,2"]) == 0
    assert list((folder / "elsewhere").iterdir()) == [] and (folder / "out" / "0" / "result.json").exists()
