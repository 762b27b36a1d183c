"""Every Python snippet of README.md and docs/ runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest
import snippets

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if page.exists()]
WITH_SNIPPETS = [page for page in PAGES if any(snippets.snippets(page))]
NEED_A_GPU = {"gpu.md"}

pytestmark = pytest.mark.skipif(not PAGES, reason="the documentation is not here")


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: str(page.name))
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    if page.name in NEED_A_GPU and not torch.cuda.is_available():
        for line, code in snippets.snippets(page):
            compile(code, f"{page}:{line}", "exec")
        return
    command = [sys.executable, snippets.__file__, str(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fenced_python_is_found_everywhere() -> None:
    """An indented or unclosed fence would be skipped without a word."""
    for page in PAGES:
        fences = page.read_text().count("```python")
        assert fences == len(list(snippets.snippets(page))), page.name
