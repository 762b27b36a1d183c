"""Make a folder with everything that gpu_report.py needs on a GPU machine: `make gpu-bundle`.

    python tools/gpu_bundle.py dist/gpu --python .venv/bin/python

The GPU machine needs neither Rust, this repository nor a network. The folder holds the release
program `ringstow`, the bench `gpu` as `bench-gpu`, the tests that need a GPU (`test-gpu` in Rust,
and `python/tests`), the wheel, and the report's scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_wheel

ROOT = Path(__file__).resolve().parent.parent
GPU = "gpu"  # tests/gpu.rs and benches/gpu.rs
REPORT = ["gpu_report.py", "gpu_document.py", "gpu_figures.py", "gpu_machine.py"]
SCRIPTS = ["compare.py", "step_time.py", *REPORT]
FOLDERS = ["comparing", "stepping"]


def cargo(*arguments: str) -> list[dict[str, Any]]:
    """Run cargo and return its JSON messages."""
    command = ["cargo", *arguments, "--message-format=json-render-diagnostics"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def executable(messages: list[dict[str, Any]], target: str) -> Path:
    """Return the executable that cargo built for a target."""
    made = [
        message["executable"]
        for message in messages
        if message.get("executable") and message["target"]["name"] == target
    ]
    return Path(made[-1])


def put_stripped(source: Path, to: Path) -> None:
    """Copy without debug information, which is most of the file."""
    strip = shutil.which("strip")
    if strip:
        subprocess.run([strip, "--strip-debug", "-o", to, source], check=True)
    else:
        shutil.copy2(source, to)


def put_tests(folder: Path) -> None:
    """Copy the Python tests and their shared modules, laid out as in the repository."""
    tests = folder / "python" / "tests"
    left_out = shutil.ignore_patterns("__pycache__", "fake_gpu", ".*")
    shutil.copytree(ROOT / "python" / "tests", tests, ignore=left_out)
    shutil.copy2(ROOT / "python" / "pyproject.toml", folder / "python")


def put_scripts(folder: Path) -> None:
    """Copy the report, the comparisons, and all that they import."""
    for name in SCRIPTS:
        shutil.copy2(ROOT / "tools" / name, folder)
    left_out = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / "tools" / name, folder / name, ignore=left_out)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Collects what gpu_report.py needs.")
    parser.add_argument("folder", type=Path, help="the folder to make; an existing one is replaced")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="an interpreter with pip"
    )
    args = parser.parse_args()
    folder: Path = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    built = cargo("build", "--release", "--features", "cli", "--bin", "ringstow", "--bench", GPU)
    put_stripped(executable(built, "ringstow"), folder / "ringstow")
    put_stripped(executable(built, GPU), folder / f"bench-{GPU}")
    tests = executable(cargo("test", "--no-run", "--test", GPU), GPU)
    put_stripped(tests, folder / f"test-{GPU}")
    make_wheel.built(Path(os.path.abspath(args.python)), folder)
    put_tests(folder)
    put_scripts(folder)
    (folder / "bundle.json").write_text(json.dumps({"commit": commit()}) + "\n")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.0f} MB; next, run in it: python gpu_report.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
