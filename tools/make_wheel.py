"""Make the wheel that is published, and try it without Rust: `make wheel`.

    python tools/wheel.py dist                 # built here: for this glibc and newer ones
    python tools/wheel.py dist --portable      # for glibc 2.28 and newer, by zig as the linker

The extension's line tables, which are most of it, go to a file of their own: `NAME.debug` beside
the wheel. gdb and addr2line find it by this name if it lies beside the extension. The wheel is
refused if it is too large, if it uses more of Python than the stable ABI has, or, with
``--portable``, if it needs a newer glibc. Then it is installed in an empty virtual environment,
where no compiler is on the path, and saves and loads. Only a wheel that passed gets into the
folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 9_000_000
EXTENSION = "_native.abi3.so"
TOOLS = ["abi3audit>=0.0.20", "wheel>=0.45"]
PORTABLE_TOOLS = [*TOOLS, "maturin[zig]>=1.9,<2"]
TRIAL = """
import sys, tempfile, pathlib, ringstow
at = pathlib.Path(tempfile.mkdtemp()) / "step-1"
ringstow.save({"step": 1, "bytes": b"x" * 100}, at, step=1)
assert ringstow.load(at)["step"] == 1 and ringstow.latest(at.parent) == str(at), at
assert not [name for name in ("torch", "numpy") if name in sys.modules]
"""


class WheelFailed(Exception):
    """The wheel cannot be published; the text says why."""


def run(*command: str | Path, **how: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, **how)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise WheelFailed(f"`{' '.join(words)}` ended with exit code {done.returncode}")


def build(python: Path, folder: Path, *, portable: bool) -> Path:
    """Build a wheel into an empty folder."""
    if portable:
        # It refuses what needs a newer glibc than the compatibility allows.
        maturin: list[str | Path] = [
            python,
            "-m",
            "maturin",
            "build",
            "--profile",
            "wheel",
            "--zig",
            "-q",
        ]
        where = ["--compatibility", "manylinux_2_28", "--manifest-path", "python/Cargo.toml"]
        # It looks for `python -m ziglang` of the first Python there.
        path = f"{python.parent}:{os.environ['PATH']}"
        run(*maturin, *where, "--out", folder, env={**os.environ, "PATH": path})
    else:
        run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, "./python")
    [wheel] = folder.glob("*.whl")
    return wheel


def without_line_tables(python: Path, wheel: Path, out: Path) -> Path:
    """Return the wheel with a stripped extension, in ``out`` with a file of what was removed."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "wheel", "unpack", "-d", folder, wheel, stdout=subprocess.DEVNULL)
        [unpacked] = Path(folder).iterdir()
        extension = unpacked / "ringstow" / EXTENSION
        debug = out / f"{wheel.stem}.debug"
        run("objcopy", "--only-keep-debug", "--compress-debug-sections=zlib", extension, debug)
        run("strip", "--strip-unneeded", extension)
        run("objcopy", f"--add-gnu-debuglink={debug}", extension)
        run(python, "-m", "wheel", "pack", "-d", out, unpacked, stdout=subprocess.DEVNULL)
    return out / wheel.name


def check(python: Path, wheel: Path) -> None:
    nbytes = wheel.stat().st_size
    print(f"{wheel.name}: {nbytes / 1e6:.1f} MB", flush=True)
    if nbytes > MOST_BYTES:
        raise WheelFailed(f"{wheel} has {nbytes} bytes, more than {MOST_BYTES}")
    run(python, "-m", "abi3audit", "--strict", "--summary", wheel)


def try_without_rust(wheel: Path) -> None:
    """Install the wheel in an empty environment, and save and load by it."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        bare = {"PATH": f"{folder}/bin", "HOME": folder}
        install = ["-m", "pip", "install", "-q", "--no-index", "--disable-pip-version-check"]
        run(python, *install, wheel, env=bare)
        run(python, "-c", TRIAL, env=bare)
        run(Path(folder) / "bin" / "ringstow", "--version", env=bare)


def main(arguments: Sequence[str] | None = None) -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("out", type=Path, help="the folder for the wheel")
    parser.add_argument("--portable", action="store_true", help="for glibc 2.28 and newer")
    asked = parser.parse_args(arguments)
    out: Path = asked.out.absolute()
    try:
        for tool in ("objcopy", "strip"):
            if shutil.which(tool) is None:
                raise WheelFailed(f"{tool} is missing: apt install binutils")
        out.mkdir(parents=True, exist_ok=True)
        python = Path(os.path.abspath(sys.executable))
        pip: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
        ]
        run(*pip, *(PORTABLE_TOOLS if asked.portable else TOOLS))
        with tempfile.TemporaryDirectory() as folder:
            built, made = Path(folder) / "built", Path(folder) / "made"
            made.mkdir()
            whole = build(python, built, portable=asked.portable)
            wheel = without_line_tables(python, whole, made)
            check(python, wheel)
            try_without_rust(wheel)
            for file in made.iterdir():
                shutil.copy2(file, out)
                print(out / file.name)
    except WheelFailed as failure:
        print(f"wheel: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
