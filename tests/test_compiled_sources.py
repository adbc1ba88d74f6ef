"""What compiled modules must not do, because it would be another thing once compiled, or would not compile."""

import ast
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def compiled_sources() -> list[str]:
    listed: list[str] = runpy.run_path(str(ROOT / "setup.py"))["compiled_sources"]()
    return listed


SOURCES = compiled_sources()


def classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree(source)) if isinstance(node, ast.ClassDef))


@cache
def tree(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text())


def dataclasses(source: str) -> Iterator[ast.ClassDef]:
    return (made for made in classes(source) if any("dataclass" in ast.unparse(decorator) for decorator in made.decorator_list))


def for_checkers_only(source: str) -> set[str]:
    """Names that are imported for type checkers only."""
    blocks = [node for node in tree(source).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


def test_there_is_something_to_compile() -> None:
    assert {"kvsim/core/tree.py", "kvsim/engine/engine.py", "kvsim/policies/eviction/base.py"} <= set(SOURCES)
    assert "kvsim/core/__init__.py" not in SOURCES


@pytest.mark.parametrize("source", SOURCES)
def test_the_body_of_a_dataclass_has_annotated_fields_and_types_are_kept(source: str) -> None:
    """Anything else would become a field too; of a field that may hold several types, OmegaConf would see none."""
    calls = [ast.unparse(node) for node in ast.walk(tree(source)) if isinstance(node, ast.Call)]
    for made in dataclasses(source):
        for node in made.body:
            assert not isinstance(node, ast.Assign), f"{made.name}: a constant is a property, or stands in the module"
            if isinstance(node, ast.AnnAssign):
                annotation = ast.unparse(node.annotation)
                assert not annotation.startswith(("ClassVar", "Final")), f"{made.name}: a constant is a property"
                if "policies" in source and "|" in annotation and not source.endswith("context.py"):
                    field = f"{ast.unparse(node.target)}={annotation}"
                    assert any(call.startswith(f"keep_types({made.name},") and field in call for call in calls), field


@pytest.mark.parametrize("source", SOURCES)
def test_fields_of_dataclasses_are_of_classes_that_are_there_when_the_module_is_loaded(source: str) -> None:
    """A compiled module that names another class here crashes; a union in quotes is never looked at."""
    absent = for_checkers_only(source)
    for made in dataclasses(source):
        fields = [node for node in made.body if isinstance(node, ast.AnnAssign)]
        assert not absent & {ast.unparse(node.annotation).strip("'\"").split("[")[0] for node in fields}, made.name


@pytest.mark.parametrize("source", SOURCES)
def test_an_abstract_class_names_its_metaclass(source: str) -> None:
    """A class that derives from ABC gets a __dict__ when it is compiled, and is none that @dataclass can handle."""
    assert [made.name for made in classes(source) if "ABC" in map(ast.unparse, made.bases)] == []


@pytest.mark.parametrize("source", SOURCES)
def test_methods_have_one_name_and_are_not_replaced(source: str) -> None:
    """``on_hit = on_insert`` does not compile, nor does an object take another method."""
    for made in classes(source):
        methods = {node.name for node in made.body if isinstance(node, ast.FunctionDef)}
        assigned = [node for node in ast.walk(made) if isinstance(node, ast.Assign)]
        for node in assigned:
            is_alias = node in made.body and ast.unparse(node.value) in methods
            replaced = {f"self.{method}" for method in methods} & set(map(ast.unparse, node.targets))
            assert not is_alias and not replaced, ast.unparse(node)


@pytest.mark.parametrize("source", [source for source in SOURCES if source.startswith("kvsim/policies/")])
def test_policies_may_be_subclassed_by_ordinary_classes(source: str) -> None:
    for made in classes(source):
        names = [made.name, *map(ast.unparse, made.bases)]
        if any(name.endswith(("Policy", "Eviction", "Prefetch")) for name in names):
            assert "mypyc_attr(allow_interpreted_subclasses=True)" in map(ast.unparse, made.decorator_list), made.name
