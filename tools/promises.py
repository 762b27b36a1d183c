"""List what the tests promise, from the first sentence of each file of tests.

    python tools/promises.py            # prints the list
    python tools/promises.py --check    # says only which file does not begin with a sentence

The list has that sentence, the file and how many test functions it has.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
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
    """Print the list, or check that it can be made; return the exit status."""
    checks = (sys.argv[1:] if arguments is None else list(arguments)) == ["--check"]
    try:
        text = listed()
    except NoPromise as error:
        print(error, file=sys.stderr)
        return 1
    if not checks:
        print(text)
    return 0


def listed() -> str:
    """Return the list, in Markdown."""
    parts = []
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
