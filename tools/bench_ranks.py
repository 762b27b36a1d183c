"""Measure the manifest of a save by 1 to 16,384 simulated ranks, for docs/figures.md.

    python tools/bench_ranks.py --json docs/figures/ranks.json

It runs the bench `manifest`, which deals a million chunks out to each number of ranks, and adds the
command, the machine and the date. It takes a few minutes and 1 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from comparing.about import TOOLS, about
from comparing.processes import CompareFailed, say

BENCH = ("cargo", "bench", "--bench", "manifest", "--")


def measure(*, smoke: bool) -> dict[str, Any]:
    """Return what the bench wrote. Raise CompareFailed if it failed."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "ranks.json"
        command = [*BENCH, "--test"] if smoke else [*BENCH]
        environment = os.environ | {"RINGSTOW_BENCH_JSON": str(file)}
        code = subprocess.run(command, env=environment, cwd=TOOLS.parent).returncode
        if code != 0:
            raise CompareFailed(f"the bench ended with exit code {code}; see above")
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def main() -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--json", type=Path, required=True, help="file for the measurements")
    parser.add_argument("--smoke", action="store_true", help="1,000 chunks, to try the tool out")
    args = parser.parse_args()
    try:
        found = measure(smoke=args.smoke)
    except CompareFailed as failure:
        say(f"bench_ranks: {failure}")
        return 1
    args.json.write_text(json.dumps(about(TOOLS) | found, indent=1))
    say(f"{args.json}: {len(found['ranks'])} numbers of ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
