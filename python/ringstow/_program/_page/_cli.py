"""``ringstow report``: arguments, and the file."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from ringstow._core import _files
from ringstow._core._errors import Error
from ringstow._program._page._gather import gather
from ringstow._program._page._html import page


def main(argv: list[str]) -> int:
    """Write the page, and return the exit code: 0, 1 for problems on the page, 2 for a failure."""
    parser = argparse.ArgumentParser(
        prog="ringstow report",
        description="Write one page of a run, as an HTML file that needs nothing else: sizes, "
        "metrics, tensors, changes, health.",
    )
    parser.add_argument("directory", help="the run's directory, or its URL in an object store")
    parser.add_argument("-o", "--output", default="report.html", help="default: report.html")
    parser.add_argument(
        "--steps", type=_count, default=50, metavar="N", help="the newest N steps; default 50"
    )
    parser.add_argument(
        "--changes", type=_count, default=10, metavar="N",
        help="compare the newest N with the one before; 0 for none; default 10",
    )  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="read every byte of these steps")
    asked = parser.parse_args(argv)
    try:
        run = gather(
            asked.directory,
            steps=max(asked.steps, 1),
            changes=asked.changes,
            verifies=asked.verify,
        )
        _write(asked.output, page(run))
    except (Error, OSError) as error:
        print(f"ringstow: {error}", file=sys.stderr)
        return 2
    bad = [one.name for one in run.checkpoints if one.problem or one.damage]
    print(asked.output)
    if bad:
        print(f"ringstow: {len(bad)} have problems: {', '.join(bad[:5])}", file=sys.stderr)
    return 1 if bad else 0


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError
    return count


def _write(path: str, text: str) -> None:
    """Write a file, or keep the existing one on a failure."""
    part = f"{path}.part"
    try:
        with _files.fresh(part) as file:
            file.write(text.encode())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
