"""``ringstow show`` of another program's checkpoint: its tensors and values. Reads no tensor."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from ringstow import _native
from ringstow._core._arguments import absolute, object_url
from ringstow._core._errors import CorruptCheckpointError, Error
from ringstow._foreign import _steps
from ringstow._reading._checkpoint import Checkpoint
from ringstow._reading._checkpoint import open as open_checkpoint
from ringstow._state.tree import _walk
from ringstow._state.tree._walk import Leaf, flat_name

_ROWS_MAX = 24
_VALUE_MAX = 80


def main(argv: list[str]) -> int | None:
    """Show another program's checkpoint, and return the exit code; None if it is not one."""
    parser = argparse.ArgumentParser(prog="ringstow show", add_help=False, exit_on_error=False)
    parser.add_argument("path")
    for flag in ("--json", "--tensors", "--values"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-a", "--all", action="store_true")
    try:
        args, rest = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit):
        return None
    if rest:
        return None
    try:
        if object_url(args.path) is not None:
            return None
        path = absolute(args.path)
        kind = _native.foreign_kind(path)
        if kind is None:
            return None
        with open_checkpoint(path) as opened:
            print("\n".join(_lines(opened, kind, args)))
    except (Error, OSError, ImportError) as error:
        print(f"ringstow: {error}", file=sys.stderr)
        return 1 if isinstance(error, CorruptCheckpointError) else 2
    return 0


def tell_left(argv: list[str]) -> None:
    """Print to stderr other programs' checkpoints in the directories that ``ls`` has listed."""
    for path in filter(os.path.isdir, argv):
        with contextlib.suppress(Error, OSError):
            left = _steps.found_in(absolute(path))
            if left:
                shown = ", ".join(f"{os.path.basename(one.path)} ({one.kind})" for one in left[-5:])
                print(
                    f"{path} holds {len(left)} of other programs, which `ringstow show` and "
                    f"ringstow.load read: {shown}",
                    file=sys.stderr,
                )


def _lines(opened: Checkpoint, kind: str, args: argparse.Namespace) -> Iterator[str]:
    info = opened.info
    values = list(_values(opened))
    if args.json:
        tensors = [
            {"name": name, "dtype": one.dtype, "shape": one.shape, "bytes": one.nbytes}
            for name, one in opened.items()
        ]
        yield json.dumps(
            {"path": opened.path, "kind": kind, "tensors": tensors, "values": dict(values)}
        )
        return
    both = args.tensors == args.values
    yield f"{opened.path}\n  kind     {kind}: {_native.FOREIGN_KINDS[kind]}"
    yield f"  tensors  {info.tensors}, {_native.size(info.tensor_bytes)}"
    if both or args.tensors:
        rows = [
            f"{name}  {one.dtype}  {list(one.shape)}  {_native.size(one.nbytes)}"
            for name, one in opened.items()
        ]
        yield from _section("TENSORS", rows, args)
    if both or args.values:
        yield from _section("VALUES", [f"{name}  {text}" for name, text in values], args)


def _section(title: str, rows: list[str], args: argparse.Namespace) -> Iterator[str]:
    shown = rows if args.all else rows[:_ROWS_MAX]
    yield f"\n{title}"
    yield from ("".join(c if c.isprintable() else "?" for c in row) for row in shown)
    if len(shown) < len(rows):
        yield f"and {len(rows) - len(shown)} more; --all shows them"


def _values(opened: Checkpoint) -> Iterator[tuple[str, str]]:
    for path, value in _walk.leaves(opened._skeleton):
        if not (isinstance(value, Leaf) and value.tag in _walk.STORED):
            yield flat_name(path), _short(value)


def _short(value: Any) -> str:
    text = str(value.body) if isinstance(value, Leaf) else repr(value)
    return text if len(text) <= _VALUE_MAX else f"{text[:_VALUE_MAX]}..."
