"""Which steps stay, go, are copied, and which is the newest: Rust decides, Python asks.

Python's modules may neither sort steps nor compare their orders, except where the ranks must meet
first.
"""

from __future__ import annotations

import ast
import pathlib

import ringstow

PACKAGE = pathlib.Path(ringstow.__file__).parent
# What a step is judged by.
MARKS = {"order", "status", "created_unix_ms"}
ALLOWED = {
    "_manager/_after_save.py: go_back": "passes the order on to Rust",
    "_manager/_many_ranks.py: _load_by_dcp": "names what is wrong with a step",
    "_manager/_node_run_directory.py: _with_copies": "nodes: after those of the nodes, the tiers'",
    "_manager/_node_run_directory.py: _worth": "nodes: one of them may know more of a step",
    "_manager/_node_run_directory.py: loadable": "nodes: of the steps that all ranks have listed",
    "_manager/_node_run_directory.py: _merged": "nodes: the lists of all ranks, as one",
    "_manager/_restore.py: _is_copy": "whether two found steps are one save",
    "_manager/_run_directory.py: follow": "passes the order on to Rust",
    "_manager/_run_directory.py: lacking": "passes the order on to Rust",
}


def judging_functions():
    """Yield the functions of what saves, finds and removes steps that look at a step's marks."""
    files = [*PACKAGE.glob("_manager/*.py"), *PACKAGE.glob("_reading/*.py")]
    files += [*PACKAGE.glob("_saving/*.py"), *PACKAGE.glob("integrations/_kit/*.py")]
    for file in files:
        for outer in ast.iter_child_nodes(ast.parse(file.read_text())):
            functions = outer.body if isinstance(outer, ast.ClassDef) else [outer]
            for function in functions:
                nodes = ast.walk(function) if isinstance(function, ast.FunctionDef) else ()
                if any(isinstance(node, ast.Attribute) and node.attr in MARKS for node in nodes):
                    yield f"{file.relative_to(PACKAGE)}: {function.name}"


def test_no_other_function_judges_steps():
    found = set(judging_functions())
    assert sorted(found - ALLOWED.keys()) == [], "ask Rust: src/manager/"
    assert sorted(ALLOWED.keys() - found) == [], "no longer there"
