"""Test and measure ringstow on this machine's GPU, and write report.json and report.md.

    make gpu-bundle                      # on a machine with Rust: fills dist/gpu
    python gpu_report.py                 # in that folder, on a machine with a GPU

It needs only that folder and Python, neither Rust nor a network. The tests use the folder's wheel,
and the figures need torch with CUDA. The report names each step that could not run, and why. Exits
with 1 if a test failed or a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_document import FIGURES, PIPELINE, Measured, Report, Step, markdown
from gpu_machine import describe

HERE = Path(__file__).resolve().parent
KEPT_CHARACTERS = 6000  # of a failed step's output
# Finds out what this Python has, in its own process because importing torch may crash.
PROBE = """
import importlib.util as util, json
found = {"pytest": util.find_spec("pytest") is not None, "torch": None, "cuda": False}
if util.find_spec("torch"):
    import torch
    found |= {"torch": torch.__version__, "cuda": torch.cuda.is_available()}
print(json.dumps(found))
"""
# Time limits in seconds.
PROGRAM, TESTS, PYTHON_TESTS, FIGURE, SANITIZER = 60, 90, 150, 60, 120


@dataclass
class Run:
    """One run of the report."""

    bundle: Path
    work: Path
    args: argparse.Namespace
    deadline: float
    report: Report = field(default_factory=Report)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def note(self, step: Step) -> None:
        self.report.steps.append(step)
        self.say(f"{step.status:8} {step.seconds:5.0f} s  {step.name}  {step.why}")

    def skip(self, name: str, why: str) -> None:
        self.note(Step(name, "skipped", why=why))

    def environment(self) -> dict[str, str]:
        path = [str(self.work / "site"), str(self.bundle)]
        return os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}

    def step(
        self, name: str, command: list[str], limit: float, cwd: Path | None = None, **more: str
    ) -> Step:
        """Run a command with a time limit, which the remaining budget may shorten."""
        limit = min(limit, self.deadline - time.monotonic())
        if limit < 2:
            step = Step(name, "skipped", why="no time left: see --budget")
        else:
            started = time.monotonic()
            status, why, output = run(command, limit, cwd or self.work, self.environment() | more)
            step = Step(name, status, time.monotonic() - started, why, output)
        self.note(step)
        return step


def run(
    command: list[str], limit: float, cwd: Path, environment: dict[str, str]
) -> tuple[Any, str, str]:
    """Run a command; return status, reason and output.

    After the time limit, kill the command and its children.
    """
    with subprocess.Popen(
        command, cwd=cwd, env=environment, start_new_session=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return "failed", f"not done after {limit:.0f} s", output
    if process.returncode != 0:
        return "failed", f"exit code {process.returncode}", output
    return "passed", "", output


def json_in(output: str) -> dict[str, Any]:
    """Return the last JSON object that begins a line of the output; empty if there is none."""
    lines = output.splitlines(keepends=True)
    for number in reversed(range(len(lines))):
        if lines[number].startswith("{"):
            answer: dict[str, Any]
            answer, _ = json.JSONDecoder().raw_decode("".join(lines[number:]))
            return answer
    return {}


# --- what there is -----------------------------------------------------------------------------


def consult_doctor(on: Run) -> bool:
    """Run `ringstow doctor`; return True if it finds a GPU."""
    step = on.step("ringstow doctor", [str(on.bundle / "ringstow"), "doctor", str(on.args.dir),
                   "--json"], PROGRAM)  # fmt: skip
    on.report.doctor = json_in(step.output).get("checks", [])
    return any(check["name"] == "GPU 0" for check in on.report.doctor)


def install(on: Run) -> bool:
    """Install the bundle's wheel; return True if it can be imported."""
    wheels = sorted(on.bundle.glob("ringstow-*.whl"))
    if not wheels:
        on.skip("install the wheel", f"there is none in {on.bundle}")
        return False
    site = on.work / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--target", str(site), str(wheels[0])]
    step = on.step("install the wheel", command, PROGRAM)
    if step.status == "failed" and "No module named pip" in step.output:
        zipfile.ZipFile(wheels[0]).extractall(site)
        step.status, step.why = "passed", "unpacked: no pip here"
    return step.status == "passed"


def probe(on: Run) -> dict[str, Any]:
    step = on.step("look for torch and pytest", [sys.executable, "-c", PROBE], PROGRAM)
    found = {"pytest": False, "torch": None, "cuda": False}
    return json_in(step.output) if step.status == "passed" else found


# --- the tests ---------------------------------------------------------------------------------


def rust_tests(on: Run) -> None:
    on.step("Rust tests", [str(on.bundle / "test-gpu")], TESTS, RINGSTOW_REAL_GPU="1")


def python_tests(on: Run, found: dict[str, Any]) -> None:
    name = "Python tests"
    if not found["pytest"] or not found["cuda"]:
        return on.skip(name, "no pytest here" if not found["pytest"] else no_cuda(found))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    on.step(name, command, PYTHON_TESTS, cwd=on.bundle / "python")


def sanitizer(on: Run) -> None:
    """Run the Rust tests under compute-sanitizer; ignore CUDA errors that they cause on purpose."""
    name = "compute-sanitizer memcheck"
    usual = "/usr/local/cuda/bin"
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=usual)
    if tool is None:
        return on.skip(name, "compute-sanitizer is not installed (it comes with the CUDA toolkit)")
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [str(on.bundle / "test-gpu"), "--test-threads", "1"]
    on.step(name, command, SANITIZER, RINGSTOW_REAL_GPU="1")


def no_cuda(found: dict[str, Any]) -> str:
    return "no torch here" if not found["torch"] else f"torch {found['torch']} sees no GPU"


# --- the figures -------------------------------------------------------------------------------


def pipeline(on: Run) -> Measured:
    """Measure the figure that needs no torch."""
    command = [str(on.bundle / "bench-gpu"), "--gpu", "0", "--dir", str(on.args.dir)]
    command += ["--copies-only", "--json", "--gb", str(on.args.gb), "--rounds", str(on.args.rounds)]
    step = on.step("bench gpu --copies-only", command, FIGURE)
    if step.status != "passed":
        return not_measured(step)
    gpu = json_in(step.output)["gpu"]
    rates = {name: rate and round(rate, 1) for name, rate in gpu["copies_gb_per_s"].items()}
    on.report.about["one large copy, GB/s"] = rates
    ratio = gpu["to_nowhere_of_large_copy"]
    if ratio is None:
        return Measured(skipped="the driver cannot pin memory: see the doctor's checks")
    rate = gpu["to_nowhere_gb_per_s"]["median"]
    values = [ratio["min"], ratio["median"], ratio["max"]]
    return Measured(values, f"{rate:.1f} GB/s; lowest, median and highest of the rounds")


def figure(on: Run, name: str) -> Measured:
    command = [sys.executable, str(on.bundle / "gpu_figures.py"), name, "--dir", str(on.args.dir)]
    command += ["--gb", str(on.args.gb), "--rounds", str(on.args.rounds)]
    command += ["--rehearse"] * on.args.rehearse
    step = on.step(f"figure {name}", command, FIGURE)
    return Measured(**json_in(step.output)) if step.status == "passed" else not_measured(step)


def not_measured(step: Step) -> Measured:
    if step.status == "skipped":
        return Measured(skipped=step.why)
    lines = step.output.strip().splitlines() or ["nothing printed"]
    return Measured(failed=f"{step.why}: {lines[-1]}")


def figures(on: Run, gpu: bool, lacking: str) -> None:
    """Measure all figures. `lacking` says why none can be measured with torch, or is empty."""
    for name in FIGURES:
        if name == PIPELINE:
            measured = pipeline(on) if gpu else Measured(skipped="no GPU here")
        else:
            measured = Measured(skipped=lacking) if lacking else figure(on, name)
        on.report.figures[name] = measured


# --- the program -------------------------------------------------------------------------------


def make(on: Run) -> None:
    """Fill the report."""
    bundled = on.bundle / "bundle.json"
    about = json.loads(bundled.read_text()) if bundled.exists() else {}
    on.report.about = describe(on.args.dir) | about
    if on.args.rehearse:
        on.report.about["rehearsed"] = "figures are from the CPU and mean nothing"
    gpu = consult_doctor(on)
    installed, found = install(on), probe(on)
    on.report.about |= {"torch": found["torch"] or "none"}
    if gpu:
        rust_tests(on)
    else:
        on.skip("Rust tests", "no GPU here: see the doctor")
    if installed:
        python_tests(on, found)
    else:
        on.skip("Python tests", "the wheel is not installed")
    lacking = "" if installed else "the wheel is not installed"
    if not (found["cuda"] or (on.args.rehearse and found["torch"])):
        lacking = lacking or no_cuda(found)
    figures(on, gpu, lacking)
    if gpu:
        sanitizer(on)
    else:
        on.skip("compute-sanitizer memcheck", "no GPU here")


def write(report: Report, out: Path) -> None:
    for step in report.steps:
        step.output = step.output[-KEPT_CHARACTERS:]
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n")
    (out / "report.md").write_text(markdown(report))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tests and measures ringstow on a GPU.")
    parser.add_argument(
        "bundle", type=Path, nargs="?", default=HERE, help="the folder of make gpu-bundle"
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="directory on the disk to measure",
    )
    parser.add_argument("--out", type=Path, default=Path(), help="directory for the report")
    parser.add_argument("--gb", type=float, default=4.0, help="size of the states, 1e9 bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=470.0, help="time limit of the report, in seconds"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run the figures on the CPU, where they mean nothing",
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.dir, out = args.dir.absolute(), args.out.absolute()
    deadline = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as work:
        on = Run(args.bundle.absolute(), Path(work), args, deadline)
        try:
            make(on)
        finally:
            write(on.report, out)
    print(f"\n{(out / 'report.md').read_text()}")
    return 0 if on.report.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
