"""Every Python snippet of README.md and docs/ runs unchanged."""

import importlib
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import snippets
import torch
from stores.fixtures import Bucket
from support import ROOT, missing

PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if page.exists()]
WITH_SNIPPETS = [page for page in PAGES if any(snippets.snippets(page))]
NEED_A_GPU = {"gpu.md"}
# They copy to ``s3://bucket``.
NEED_A_STORE = {"tiers.md"}
# What the extra "test" installs for one page.
NEED_MODULES = {"operations.md": ("tensorboard", "prometheus_client", "opentelemetry.sdk.metrics")}
# test_tutorial.py runs its program on several ranks.
NEED_RANKS = {"tutorial-fsdp2.md"}
# python/trainer_tests runs their snippets, where the frameworks are installed.
TRAINERS = ROOT / "docs" / "trainers"
NEED_TRAINERS = {"servers.md"}

pytestmark = pytest.mark.skipif(not PAGES, reason="the documentation is not here")


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: str(page.name))
def test_snippets_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    lacks_gpu = page.name in NEED_A_GPU and not torch.cuda.is_available()
    is_trainers = page.parent == TRAINERS or page.name in NEED_TRAINERS
    if is_trainers or page.name in NEED_RANKS or lacks_gpu:
        for line, code in snippets.snippets(page):
            compile(code, f"{page}:{line}", "exec")
        return
    for module in NEED_MODULES.get(page.name, ()):
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing(f"{error}: pip install './python[test]'")
    if page.name in NEED_A_STORE:
        Bucket(request.getfixturevalue("bucket").server, "bucket")
    forked.script(snippets.__file__, page, cwd=tmp_path, check=True)


# The names of `snippets.trainer`.
TYPED = """
from typing import Any
import torch
import ringstow
model: torch.nn.Module
optimizer: torch.optim.Optimizer
scheduler: torch.optim.lr_scheduler.LRScheduler
batch: torch.Tensor
batches: list[torch.Tensor]
state: dict[str, Any]
step: int
steps: int
path: str
"""


def test_readme_passes_a_strict_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    code = [code for _, code in snippets.snippets(ROOT / "README.md")]
    program = tmp_path / "readme.py"
    program.write_text("\n".join([TYPED, *code]))
    command = [sys.executable, "-m", "mypy", "--strict", str(program)]
    done = subprocess.run(command, cwd=ROOT / "python", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_all_fenced_python_is_found() -> None:
    """The runner would silently skip an indented or unclosed fence."""
    for page in PAGES:
        fences = page.read_text().count("```python")
        assert fences == len(list(snippets.snippets(page))), page.name
