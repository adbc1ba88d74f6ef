"""Compiles the modules that pyproject.toml lists (tool.kvsim) with mypyc: the same typed Python, as extension modules.

KVSIM_COMPILE=1 compiles or fails, KVSIM_COMPILE=0 does not compile. Without it a wheel is compiled where that is possible, an
editable install is not, and `python setup.py build_ext --inplace` (make compiled) always is, beside the sources.
"""

import os
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from kvsim.installation import BrokenCheckout, check_links, checksum, remove, write_record  # noqa: E402  # noqa: E402

MYPY = ["--config-file=", "--cache-dir=build/mypy", "--namespace-packages", "--explicit-package-bases", "--follow-imports=silent"]
"""Other packages are of type Any, installed or not: the same sources give the same code everywhere."""
MYPY += ["--no-site-packages", "--ignore-missing-imports"]
OPTIMIZATION = os.environ.get("KVSIM_OPTIMIZATION", "3")
SAME_FLOATS = [] if sys.platform == "win32" else ["-ffp-contract=off"]
"""No fused multiply-add: a compiled run has the results of pure Python to the last bit."""
DIRECT_CALLS = [] if sys.platform == "win32" else ["-fvisibility=hidden"]
"""Modules call each other without a table of names, and may be inlined: 2 % less work in a replay."""


def compiled_sources() -> list[str]:
    """What pyproject.toml says is compiled, named from here."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvsim"]
    compiled, interpreted = (
        {path.relative_to(ROOT).as_posix() for pattern in listed[name] for path in ROOT.glob(pattern)}
        for name in ("compiled", "interpreted")
    )
    return sorted(compiled - interpreted)


def extensions() -> list[Extension]:
    """The extension modules to build now; none where kvsim stays pure Python."""
    is_in_place = "build_ext" in sys.argv
    default = "1" if is_in_place else "auto" if "bdist_wheel" in sys.argv else "0"
    choice = os.environ.get("KVSIM_COMPILE", default)
    if choice == "0" or not {"build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv):
        return []
    if reason := _why_not():
        if choice == "1":
            sys.exit(f"kvsim: cannot compile: {reason}")
        print(f"kvsim: pure Python, as there is {reason}", file=sys.stderr)
        return []
    from mypyc.build import mypycify

    os.chdir(ROOT)
    Build.checksums = {source.removeprefix("kvsim/"): checksum(ROOT / source) for source in compiled_sources()}
    built: list[Extension] = mypycify(
        [*MYPY, *compiled_sources()], opt_level=OPTIMIZATION, debug_level="0", multi_file=True, group_name="kvsim.compiled"
    )
    for extension in built:
        extension.extra_compile_args = [*extension.extra_compile_args, *SAME_FLOATS, *DIRECT_CALLS]
        extension.include_dirs = [*extension.include_dirs, "build/kvsim"]
    return built


def _why_not() -> str:
    """What is missing to compile; nothing if all is there."""
    try:
        import mypyc.build  # noqa: F401
    except ImportError:
        return "no mypyc (pip install mypy)"
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.c"
        probe.write_text("#include <Python.h>\n")
        try:
            compiler = new_compiler()
            customize_compiler(compiler)
            compiler.compile([str(probe)], output_dir=folder, include_dirs=[sysconfig.get_path("include")])
        except (BaseError, CCompilerError, OSError):
            return "no C compiler, or no Python headers"
    return ""


class Build(build_ext):
    """Builds all modules anew, and notes of which sources they are."""

    checksums: ClassVar[dict[str, str | None]] = {}
    """Of the sources, taken before they were read."""

    def run(self) -> None:
        if not self.extensions:
            return
        package = (ROOT if self.inplace else Path(self.build_lib)) / "kvsim"
        remove(package)
        super().run()
        write_record(package, self.checksums)

    def build_extensions(self) -> None:
        compile_all = self.compiler.compile

        def compile_at_once(sources: list[str], *args: Any, **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], *args, **options), sources)
                return list(chain.from_iterable(objects))

        self.compiler.compile = compile_at_once
        super().build_extensions()


if __name__ == "__main__":
    try:
        check_links()
    except BrokenCheckout as error:
        sys.exit(f"kvsim: {error}")
    setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
