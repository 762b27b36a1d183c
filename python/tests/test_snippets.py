"""Every Python snippet of README.md and docs/ runs unchanged."""

from pathlib import Path

import forked
import pytest
import snippets
import torch

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
    done = forked.script(snippets.__file__, page, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_fenced_python_is_found() -> None:
    """The runner would silently skip an indented or unclosed fence."""
    for page in PAGES:
        fences = page.read_text().count("```python")
        assert fences == len(list(snippets.snippets(page))), page.name
