"""Find what the documentation names and the tree does not have.

    python tools/check_docs.py    # prints each, with page and line; exits with 1 if there is any

It reads the code in backticks and the command lines of every page, and the docstrings of the
package: names and keywords of ringstow, its commands and their flags, make's targets, paths and
commits. Each figure of README is on a page of measurements. Links are the business of
python/tests/test_links.py, and snippets run in test_snippets.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("", ".convert", ".dcp", ".distributed", ".monitoring")
INSTANCES = {"manager": "CheckpointManager", "handle": "SaveHandle", "ckpt": "Checkpoint"}
"""What the pages call an object of a class."""
FOREIGN = {
    "ringstow.toml",  # a file
    *("args", "options"),  # of orbax's CheckpointManager, which has the name of ours
    "manager.is_saving",  # of Rust's manager
    # Metrics of OpenTelemetry.
    *(f"ringstow.save.{one}" for one in ("io", "duration", "blocked.duration", "pool")),
    *("ringstow.saves", "ringstow.saves.skipped"),
}
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
NAME = re.compile(rf"(?<![\w./:\"'-])(?:ringstow|{'|'.join(INSTANCES)})(?:\.[A-Za-z]\w*)+")
RUST = re.compile(r"(?<![\w:])(ringstow|[A-Z]\w+)(?:::\w+)+")
FOLDERS = r"(?:docs|src|tests|tools|python|examples|benches|burn|\.ci|\.github)"
PATH = re.compile(rf"(?<![\w/.:~=-]){FOLDERS}/[\w./*-]*\w")
COMMIT = re.compile(r"[0-9a-f]{7,40}")
FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?")
FIGURE = re.compile(r"(?<![\w.-])(?:\d+\.\d+|\d+(?= s\b))(?! GB to )")
TARGET = re.compile(r"(?:^|[\s|])--(bench|test|example) (\w+)")


class Code(NamedTuple):
    """A piece of code in a text, and where it is."""

    where: str
    text: str


def main() -> int:
    """Print what does not exist; return the exit status."""
    found = list(problems(ROOT))
    print(*found, sep="\n" if found else "", end="\n" if found else "")
    return 1 if found else 0


def problems(root: Path) -> Iterator[str]:
    """Yield a line for each name in the pages and docstrings below a root that does not exist."""
    pages = (one for where in ("*.md", "docs/**/*.md", "tools/*.md") for one in root.glob(where))
    for page in sorted(pages):
        yield from _of(of_page(page.read_text(), str(page.relative_to(root))))
    for module in sorted(root.glob("python/ringstow/**/*.py")):
        yield from _of(of_docstrings(module.read_text(), str(module.relative_to(root))))

    yield from _figures(root)


def _figures(root: Path) -> Iterator[str]:
    """Yield the figures of README that no page of measurements has, up to rounding."""
    pages = [root / name for name in ("README.md", "docs/benchmarks.md", "docs/figures.md")]
    readme, *measured = (page.read_text() if page.exists() else "" for page in pages)
    there = {float(number) for page in measured for number in NUMBER.findall(page)}
    section = readme.partition("## Performance")[2].partition("\n## ")[0]
    for line in re.findall(r"^- .*", section, re.MULTILINE):
        for number in FIGURE.findall(line):
            digits = len(number.partition(".")[2])
            if all(f"{one:.{digits}f}" != number for one in there):
                yield f"README.md: no page of measurements has {number}: {line}"


def _of(pieces: Iterator[Code]) -> Iterator[str]:
    return (f"{code.where}: {problem}" for code in pieces for problem in check(code))


def of_page(text: str, name: str) -> Iterator[Code]:
    """Yield the code of a Markdown page: command lines in fences, spans, cells that are hashes."""
    for fence in FENCE.finditer(text):
        first = text.count("\n", 0, fence.start(2)) + 1
        if fence[1] in {"", "sh", "bash", "console", "text"}:
            for number, line in enumerate(fence[2].splitlines(), first):
                command = line.strip().removeprefix("$ ").partition(" #")[0]
                if command.startswith(("ringstow ", "make ", "python ", "cargo ")):
                    yield Code(f"{name}:{number}", command.strip())
    # Lines keep their numbers.
    prose = FENCE.sub(lambda fence: re.sub(r"[^\n]", "", fence[0]), text)
    yield from _spans(prose, name, 1)
    for number, line in enumerate(prose.splitlines(), 1):
        if line.startswith("|"):
            for word in re.findall(r"[\w.-]+", line.rstrip(" |").rpartition("|")[2]):
                if COMMIT.fullmatch(word):
                    yield Code(f"{name}:{number}", word)


def of_docstrings(text: str, name: str) -> Iterator[Code]:
    """Yield the code in the docstrings of a module."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        docstring = ast.get_docstring(node, clean=False) if isinstance(node, kinds) else None
        if docstring:
            assert isinstance(node, kinds)
            yield from _spans(docstring, name, node.body[0].lineno)


def _spans(text: str, name: str, first: int) -> Iterator[Code]:
    for span in SPAN.finditer(text):
        line = first + text.count("\n", 0, span.start())
        yield Code(f"{name}:{line}", " ".join(span[2].split()))


def check(code: Code) -> Iterator[str]:
    """Yield what is wrong with a piece of code."""
    words = code.text.split()
    if words[0] == "ringstow" and len(words) > 1:
        yield from _command(words[1], words[2:])
    elif words[0] == "make" and len(words) > 1:
        yield from _make(words[1:])
    else:
        yield from _names(code.text)
        yield from _keywords(code.text)
    yield from _paths(code.text)
    if COMMIT.fullmatch(code.text) and re.search(r"[a-f]", code.text) and not _exists(code.text):
        yield f"no commit {code.text}"


def _command(command: str, words: list[str]) -> Iterator[str]:
    if not re.fullmatch(r"[a-z]+", command):  # `ringstow --version`, `ringstow COMMAND`
        return
    known = _flags(command)
    if known is None:
        yield f"no command `ringstow {command}`"
        return
    for flag in FLAG.findall(" ".join(words)):
        if flag not in known:
            yield f"`ringstow {command}` has no {flag}"


@cache
def _flags(command: str) -> frozenset[str] | None:
    """Return the flags of a command of the program, or None if there is no such command."""
    run = [sys.executable, "-m", "ringstow", command, "--help"]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    return frozenset(FLAG.findall(done.stdout)) if done.returncode == 0 else None


def _make(words: list[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    targets = {one for line in re.findall(r"^([\w -]+):", makefile, re.M) for one in line.split()}
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable and not re.search(rf"^{name} *\?=|\$\({name}\)", makefile, re.M):
            yield f"make knows no {name}"
        elif not is_variable and name not in targets and re.fullmatch(r"[a-z-]+", name):
            yield f"no target `make {name}`"


def _names(text: str) -> Iterator[str]:
    for match in NAME.finditer(text):
        name = match[0]
        if name not in FOREIGN and _resolved(name) is None:
            yield f"no {name}"
    for match in RUST.finditer(text):
        is_ours = match[1] == "ringstow" or re.search(rf"\b(enum|struct) {match[1]}\b", _rust())
        if is_ours and not re.search(rf"\b{match[0].rpartition(':')[2]}\b", _rust()):
            yield f"no {match[0]}"


@cache
def _rust() -> str:
    return "\n".join(file.read_text() for file in sorted((ROOT / "src").rglob("*.rs")))


@cache
def _resolved(name: str) -> tuple[Any] | None:
    """Return what a dotted name is, in a tuple of its own, or None if it is nothing."""
    first, *rest = name.split(".")
    here = importlib.import_module("ringstow")
    found: Any = getattr(here, INSTANCES[first]) if first in INSTANCES else here
    if rest[:1] == ["integrations"]:
        return _of_integration(rest[1:])
    for one in rest:
        if isinstance(found, type) and one in _fields(found):
            return (None,)  # what it holds has a type that nobody looks up here
        try:
            found = getattr(found, one)
        except AttributeError:
            return None
        if isinstance(found, property):
            return (found,)
    return (found,)


def _fields(cls: type) -> set[str]:
    """Return the attributes that a class annotates, or sets in one of its methods."""
    names = {name for one in cls.__mro__ for name in getattr(one, "__annotations__", {})}
    for one in cls.__mro__:
        if one.__module__.startswith("ringstow"):
            names.update(re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? =", inspect.getsource(one)))
    return names


def _of_integration(path: list[str]) -> tuple[Any] | None:
    """Look a name up without an import: its framework may not be installed."""
    package = ROOT / "python/ringstow/integrations"
    if not path:
        return (None,)
    file = package / f"{path[0]}.py"
    words = re.compile(rf"\b{path[-1]}\b")
    files = [file, *package.glob(f"_{path[0]}/*.py")] if file.exists() else []
    return (None,) if any(words.search(one.read_text()) for one in files) else None


def _keywords(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(re.sub(r"…", "...", text).replace("await ", ""))
    except SyntaxError:
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        known = _parameters_of(ast.unparse(call.func))
        for keyword in call.keywords:
            if known is not None and keyword.arg and keyword.arg not in {*known, *FOREIGN}:
                yield f"{ast.unparse(call.func)} takes no {keyword.arg}="


def _parameters_of(function: str) -> set[str] | None:
    """Return the parameters of a call, or None if it takes any or is not ours."""
    if NAME.fullmatch(function):
        found = _resolved(function)
        return _parameters(found[0]) if found and callable(found[0]) else None
    if function.startswith("."):
        return None
    # A bare name may be a function of any of our modules, or a method.
    candidates = [_parameters(one) for one in _public().get(function, ())]
    if not candidates or None in candidates or "." in function:
        return None
    return set().union(*(one for one in candidates if one is not None))


def _parameters(function: Any) -> set[str] | None:
    if isinstance(function, ast.arguments):
        named = (*function.posonlyargs, *function.args, *function.kwonlyargs)
        return None if function.kwarg else {one.arg for one in named}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return {one.name for one in parameters}


@cache
def _public() -> dict[str, list[Any]]:
    """Return the public functions and methods by name, of integrations their arguments alone."""
    found: dict[str, list[Any]] = {}
    for suffix in MODULES:
        module = importlib.import_module(f"ringstow{suffix}")
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            found.setdefault(name, []).append(value)
            for method, inner in inspect.getmembers(value) if isinstance(value, type) else ():
                if callable(inner) and not method.startswith("_"):
                    found.setdefault(method, []).append(inner)
    for file in (ROOT / "python/ringstow/integrations").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node.args)
    return found


def _paths(text: str) -> Iterator[str]:
    for path in PATH.findall(text):
        # In capitals: something to fill in.
        if not re.search(r"/[A-Z]+\b", path) and not any(ROOT.glob(path)):
            yield f"no {path}"
    for kind, name in TARGET.findall(text) if text.startswith("cargo ") else ():
        folder = {"bench": "benches", "test": "tests", "example": "examples"}[kind]
        if not any((*ROOT.glob(f"{folder}/{name}*"), *ROOT.glob(f"examples/*/{folder}/{name}*"))):
            yield f"no {folder}/{name}"
    if tool := re.match(r"(?:python )?(tools/\w+\.py)(.*)", text):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", tool[2]):
            if f'"{flag}"' not in _tools():
                yield f"{tool[1]} has no {flag}"


@cache
def _tools() -> str:
    return "\n".join(file.read_text() for file in sorted((ROOT / "tools").rglob("*.py")))


@cache
def _exists(commit: str) -> bool:
    """Return whether a commit exists, or cannot be looked up: without git, or all its history."""
    shallow = _git("rev-parse", "--is-shallow-repository")
    if shallow.returncode or shallow.stdout.strip() == "true":
        return True
    return _git("cat-file", "-e", f"{commit}^{{commit}}").returncode == 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return subprocess.CompletedProcess(command, 1, "", "")


if __name__ == "__main__":
    sys.exit(main())
