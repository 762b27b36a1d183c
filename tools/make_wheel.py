"""Make a wheel, and try it without Rust: `make wheel`.

    python tools/make_wheel.py dist              # built here: for this glibc and newer ones
    python tools/make_wheel.py dist --portable   # to publish: for glibc 2.28 and newer, by zig

The extension's line tables, which are most of it, go to a file of their own: `NAME.debug` beside
the wheel. gdb and addr2line find it by this name if it lies beside the extension. The wheel is
refused if it is too large, if it uses more of Python than the stable ABI has, or, with
``--portable``, if it needs a newer glibc. Then it is installed in an empty virtual environment,
where no compiler is on the path, and saves and loads; with ``--tests``, the core of the tests runs
there, too. Only a wheel that passed gets into the folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 9_000_000
MOST_BYTES_PORTABLE = 6_000_000
EXTENSION = "_native.abi3.so"
TOOLS = ["abi3audit>=0.0.20", "wheel>=0.45"]
PORTABLE_TOOLS = [*TOOLS, "maturin[zig]>=1.9,<2", "zopflipy>=1.10,<2"]
PIP = ("-m", "pip", "--disable-pip-version-check")
CORE = [
    f"python/tests/{name}.py"
    for name in ("test_round_trip", "test_open", "test_retain", "manager/test_manager")
]
# Half a minute for 4 % of the bytes that everybody fetches.
PRESS = """
import sys, zipfile, zopfli
with zipfile.ZipFile(sys.argv[1]) as before, zopfli.ZipFile(sys.argv[2], "w", 8) as after:
    for info in before.infolist():
        after.writestr(info, before.read(info))
"""
TRIAL = """
import sys, tempfile, pathlib, ringstow
at = pathlib.Path(tempfile.mkdtemp()) / "step-1"
ringstow.save({"step": 1, "bytes": b"x" * 100}, at, step=1)
assert ringstow.load(at)["step"] == 1 and ringstow.latest(at.parent).path == str(at), at
assert not [name for name in ("torch", "numpy") if name in sys.modules]
"""


class WheelFailed(Exception):
    """The wheel cannot be published; the text says why."""


def run(*command: str | Path, **how: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, **how)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise WheelFailed(f"`{' '.join(words)}` ended with exit code {done.returncode}")


def built(python: Path, folder: Path) -> Path:
    """Build a wheel for this machine's glibc and newer ones into a folder without one."""
    run(python, *PIP, "wheel", "-q", "--no-deps", "--wheel-dir", folder, "./python")
    return only_wheel(folder)


def built_portable(python: Path, folder: Path) -> Path:
    """Build a wheel for glibc 2.28 and newer ones into a folder without one."""
    how = (
        "--profile wheel --zig -q --compatibility manylinux_2_28 --manifest-path python/Cargo.toml"
    )
    # maturin looks for `python -m ziglang` of the first Python there. It refuses what needs a newer
    # glibc than the compatibility allows.
    path = f"{python.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    run(python, "-m", "maturin", "build", *how.split(), "--out", folder, env=environment)
    return only_wheel(folder)


def only_wheel(folder: Path) -> Path:
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


def press(python: Path, wheel: Path) -> None:
    """Compress a wheel as far as its format goes."""
    pressed = wheel.with_suffix(".pressed")
    run(python, "-c", PRESS, wheel, pressed)
    pressed.replace(wheel)


def check(python: Path, wheel: Path, most_bytes: int) -> None:
    nbytes = wheel.stat().st_size
    print(f"{wheel.name}: {nbytes / 1e6:.1f} MB", flush=True)
    if nbytes > most_bytes:
        raise WheelFailed(f"{wheel} has {nbytes} bytes, more than {most_bytes}")
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if "__pycache__" in name]
    if compiled:
        raise WheelFailed(f"{wheel} has {compiled[0]}, which belongs to the tree that it is from")
    run(python, "-m", "abi3audit", "--strict", "--summary", wheel)


def try_without_rust(wheel: Path, *, tests: bool) -> None:
    """Install the wheel in an empty environment, and save and load by it; then run tests, if asked.

    The tests find PyTorch and the like in the environment that runs this, and ringstow in the new.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        bare = {"PATH": f"{folder}/bin", "HOME": folder}
        run(python, *PIP, "install", "-q", "--no-index", wheel, env=bare)
        run(python, "-c", TRIAL, env=bare)
        run(Path(folder) / "bin" / "ringstow", "--version", env=bare)
        if tests:
            [packages] = Path(folder).glob("lib/python*/site-packages")
            (packages / "tests.pth").write_text(sysconfig.get_path("purelib"))
            is_own = f"import ringstow; assert ringstow.__file__.startswith({folder!r})"
            run(python, "-c", is_own, env=bare)
            run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE, env=bare)


def make(python: Path, out: Path, *, portable: bool, tests: bool) -> None:
    """Put a wheel that passed all checks, and its line tables, into a folder.

    Raises:
        WheelFailed: it did not pass, or something is missing that makes it.
    """
    for tool in ("objcopy", "strip"):
        if shutil.which(tool) is None:
            raise WheelFailed(f"{tool} is missing: apt install binutils")
    run(python, *PIP, "install", "-q", *(PORTABLE_TOOLS if portable else TOOLS))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.mkdir()
        whole = (built_portable if portable else built)(python, Path(folder) / "built")
        wheel = without_line_tables(python, whole, made)
        if portable:
            press(python, wheel)
        check(python, wheel, MOST_BYTES_PORTABLE if portable else MOST_BYTES)
        try_without_rust(wheel, tests=tests)
        for file in made.iterdir():
            shutil.copy2(file, out)
            print(out / file.name)


def main(arguments: Sequence[str] | None = None) -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("out", type=Path, help="the folder for the wheel")
    parser.add_argument("--portable", action="store_true", help="for glibc 2.28 and newer")
    parser.add_argument("--tests", action="store_true", help="also run the core of the tests by it")
    asked = parser.parse_args(arguments)
    python = Path(os.path.abspath(sys.executable))
    try:
        make(python, asked.out.absolute(), portable=asked.portable, tests=asked.tests)
    except WheelFailed as failure:
        print(f"make_wheel: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
