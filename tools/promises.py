"""List what the tests promise, from their own first sentences: docs/internals/promises.md.

    python tools/promises.py            # writes the page
    python tools/promises.py --check    # fails if the page is not what this would write

Each file of tests begins with the promise that it holds. The page has that sentence, the file and
how many test functions it has, so that a change shows which promise lost a test.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals" / "promises.md"
HEAD = """# What the tests promise

Written by `tools/promises.py` from the first sentence of each file of tests, to which `make
check-format` holds it. A test that is taken out changes a number here: its commit names the test
that still proves the promise. [operations.md](../operations.md#promises) has the promises that rigs
try to break, [testing.md](testing.md) how to run them.
"""
PARTS = {
    "Rust: one program": "tests/suite",
    "Rust: programs of their own": "tests",
    "Python": "python/tests",
    "Python: `CheckpointManager`": "python/tests/manager",
    "Python: handles and the guard of background saves": "python/tests/handle python/tests/guard",
    "Python: several ranks": "python/tests/dcp",
    "Python: GPUs, the driver's double and real ones": "python/tests/fake_gpu python/tests/gpu",
    "Python: training frameworks": "python/trainer_tests",
}
RUST_TEST = re.compile(r"^\s*#\[test\]", re.MULTILINE)


class Promise(NamedTuple):
    """What one file of tests, or one directory of a Rust test program, holds."""

    text: str
    path: str
    tests: int


class NoPromise(Exception):
    """A file of tests does not begin with a sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; return the exit status."""
    checks = (sys.argv[1:] if arguments is None else list(arguments)) == ["--check"]
    try:
        text = page()
    except NoPromise as error:
        print(error)
        return 1
    if not checks:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        print(f"{PAGE.relative_to(ROOT)} is not what the tests say: python tools/promises.py")
        return 1
    return 0


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, folders in PARTS.items():
        found = [one for folder in folders.split() for one in promises(ROOT / folder)]
        count = sum(one.tests for one in found)
        rows = "\n".join(f"| {one.text} | `{one.path}` | {one.tests} |" for one in found)
        parts.append(
            f"## {title}: {count:,}\n\n| promise | tests | how many |\n|---|---|---|\n{rows}\n"
        )
    return "\n".join(parts)


def promises(folder: Path) -> Iterator[Promise]:
    """Yield what the files of a folder promise, by their names."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.name.startswith("test_"):
            yield of_python(path)
        elif path.suffix == ".rs" and path.name != "main.rs":
            yield of_rust(path, [path, *below(path.with_suffix(""))])
        elif (path / "main.rs").exists() and path.name != "suite":
            yield of_rust(path / "main.rs", below(path))


def below(folder: Path) -> list[Path]:
    """Return the Rust files in a folder, which may not be there."""
    return sorted(folder.rglob("*.rs"))


def of_python(path: Path) -> Promise:
    """Return what a file of Python tests promises."""
    tree = ast.parse(path.read_text())
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return promise(ast.get_docstring(tree) or "", path, len(tests))


def of_rust(path: Path, files: list[Path]) -> Promise:
    """Return what a file of Rust tests promises, with the tests of its modules."""
    head = [line[3:].strip() for line in path.read_text().splitlines() if line.startswith("//!")]
    return promise("\n".join(head), path, sum(len(RUST_TEST.findall(f.read_text())) for f in files))


def promise(text: str, path: Path, tests: int) -> Promise:
    """Return a promise with the first paragraph's first sentence.

    Raises:
        NoPromise: there is none.
    """
    name = str(path.relative_to(ROOT))
    first = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s(?=[A-Z`])", first)[0]
    if not sentence:
        raise NoPromise(f"{name} does not begin with what it promises, in a sentence")
    return Promise(sentence.replace("|", "\\|"), name, tests)


if __name__ == "__main__":
    sys.exit(main())
