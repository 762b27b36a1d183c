"""A virtual environment for each peer that needs one, on top of the project's own.

It sees the project's packages, such as PyTorch, and never downloads or changes them. The
environments are kept in .peers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from comparing.peer import Peer
from comparing.processes import CompareFailed, run_kept, run_worker

CACHE = Path(__file__).resolve().parent.parent.parent / ".peers"
STAMP = ".ready.json"
INSTALL_SECONDS_MAX = 600.0


@dataclass(frozen=True)
class Environment:
    """A peer's interpreter, version and environment variables."""

    python: str
    version: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def pinned() -> list[str]:
    """Return pip constraints that pin the project's PyTorch, so that all peers use the same one."""
    return [f"torch=={importlib.metadata.version('torch')}"]


def environment_name(requirements: tuple[str, ...], constraints: list[str]) -> str:
    """Return a folder name that differs for other requirements, another PyTorch or Python."""
    told = json.dumps([requirements, constraints, sys.version_info[:2], sys.prefix])
    first = re.split("[^A-Za-z0-9._-]", requirements[0])[0]
    return f"{first}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def pip_reason(output: str) -> str:
    """Return one line of pip's output that says why it failed."""
    errors = [line for line in output.splitlines() if line.lstrip().lower().startswith("error:")]
    conflict = [line.strip() for line in output.splitlines() if " depends on " in line]
    chosen = (errors[:1] or output.strip().splitlines()[-1:] or ["no output"])[0].strip()
    return "; ".join([chosen, *conflict[:1]])[:300]


def create(folder: Path) -> Path:
    """Create an empty environment that sees the project's packages; return its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    ours = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # addsitedir, because .pth files may point to the project's packages.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in ours]
    (packages / "project.pth").write_text("".join(lines))
    return python


def install(folder: Path, requirements: tuple[str, ...], log: Path, seconds_max: float) -> None:
    python = create(folder)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(line + "\n" for line in pinned()))
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--constraint", str(constraints), *requirements]
    code, output = run_kept(command, log, seconds_max)
    if code != 0:
        raise CompareFailed("pip could not install it: " + pip_reason(output))


def variables_of(folder: Path) -> dict[str, str]:
    """Return variables that put its programs (ninja) first and keep its builds in its folder."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"PATH": path, "TORCH_EXTENSIONS_DIR": str(folder / "extensions")}


def environment_of(
    requirements: tuple[str, ...], log: Path, seconds_max: float = INSTALL_SECONDS_MAX,
    cache: Path = CACHE,
) -> Environment:  # fmt: skip
    """Return the environment that holds `requirements`; create it if it is missing."""
    if not requirements:
        return Environment(sys.executable)
    cache.mkdir(exist_ok=True)
    folder = cache / environment_name(requirements, pinned())
    if not (folder / STAMP).exists():
        install(folder, requirements, log, seconds_max)
        (folder / STAMP).write_text(json.dumps(list(requirements)))
    return Environment(str(folder / "bin" / "python"), variables=variables_of(folder))


def prepared(name: str, peer: Peer, log: Path, seconds_max: float) -> Environment:
    """Return the peer's environment after checking that the peer imports and builds there."""
    where = environment_of(peer.requirements, log, seconds_max)
    # PyTorch waits forever for the lock of a build that was killed.
    for lock in Path(where.variables.get("TORCH_EXTENSIONS_DIR", os.devnull)).glob("*/lock"):
        lock.unlink()
    arguments = ["prepare", name, str(CACHE)]
    answer = run_worker(where.python, arguments, log, seconds_max, where.variables)
    return Environment(where.python, answer["version"], where.variables)
