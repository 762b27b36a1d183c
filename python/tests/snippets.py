"""Run the Python snippets of one page in a temporary directory: ``python snippets.py PAGE``.

The snippets of a page run in order and share their names. A page starts with a trainer's names:
``model``, ``optimizer``, ``scheduler``, ``state``, ``step``, ``steps``, ``path``.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(page: Path, section: str = "") -> Iterator[tuple[int, str]]:
    """Yield each Python snippet of a page, or of one section, with its first line's number."""
    text = page.read_text()
    begin = text.index(f"\n## {section}\n") if section else 0
    end = text.find("\n## ", begin + 1) if section else -1
    for match in SNIPPET.finditer(text, begin, end if end > 0 else len(text)):
        yield text.count("\n", 0, match.start(1)) + 1, match.group(1)


def run(page: Path, root: Path) -> None:
    """Run all snippets of a page. ``/mnt`` in a snippet becomes a directory of this run."""
    names = trainer(root, starts=page.name == "README.md")
    for line, code in snippets(page):
        code = code.replace('"/mnt/', f'"{root}/mnt/')
        # Empty lines in front, so that a traceback names the page's line.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


def trainer(root: Path, *, starts: bool) -> dict[str, object]:
    """Return the names that every snippet may use, and create the files that some read.

    README ``starts`` a run of its own.
    """
    import torch
    import torch.distributed as dist

    import ringstow

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    batch = torch.randn(4, 8)
    model(batch).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1000}
    torch.save({"model": model.state_dict()}, root / "model.pt")
    for disk in "abc":
        (root / "mnt" / disk / "ckpt").mkdir(parents=True)
        (root / "mnt" / disk / "run").mkdir()
    for step in () if starts else (900, 1000):
        ringstow.save(state, root / "run" / f"step-{step:08}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {
        "batch": batch,
        "batches": [batch] * 3,
        "dist": dist,
        "model": model,
        "optimizer": optimizer,
        "path": str(root / "elsewhere" / "step-1"),
        "process_group": dist.group.WORLD,
        "ringstow": ringstow,
        "scheduler": scheduler,
        "state": state,
        "step": 1000,
        "steps": 4,
        "torch": torch,
    }


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path.cwd())
