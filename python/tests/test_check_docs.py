"""What the documentation names exists, and tools/check_docs.py finds what does not."""

import check_docs
import pytest
from support import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "docs").exists(), reason="the documentation is not here"
)

WRONG = {
    "`ringstow.sav(state, path)`": "no ringstow.sav",
    "`ringstow.dcp.Writer`": "no ringstow.dcp.Writer",
    "`ringstow.integrations.jax`": "no ringstow.integrations.jax",
    "`ringstow::sav`": "no ringstow::sav",
    "`Checkpoint::open_it_all`": "no Checkpoint::open_it_all",
    "`manager.saves()`": "no manager.saves",
    '`ringstow.save(state, path, speed="high")`': "ringstow.save takes no speed=",
    "`restore(4, in_to=state)`": "restore takes no in_to=",
    "`CheckpointManager(root, max_to_keep=3)`": "CheckpointManager takes no max_to_keep=",
    "`manager.save_async(\n1, state, block=True)`": "manager.save_async takes no block=",
    "`ringstow erase run`": "no command `ringstow erase`",
    "`ringstow ls run --deep`": "`ringstow ls` has no --deep",
    "```\n$ ringstow ls --deep  # all\n```": "`ringstow ls` has no --deep",
    "`make tests`": "no target `make tests`",
    "`make compare SPEED=4`": "make knows no SPEED",
    "`src/saves.rs`": "no src/saves.rs",
    "`python tools/compare.py --speed`": "tools/compare.py has no --speed",
    "`cargo bench --bench saves`": "no benches/saves",
    "`abc1234`": "no commit abc1234",
    "| `make test` | 3 | abc1234 to fed1234 |": "no commit abc1234",
}
RIGHT = """
`ringstow.save(state, path, step=1)`, `ringstow.dcp.StorageWriter`, `ringstow.toml`,
`ringstow::save`, `Vec::news`, `manager.restore(into=state)`, `restore(4, into=state)`,
`torch.save(state, max=3)`, `step.metrics`, `report.seconds`, `ringstow ls run --json`,
`make compare GB=4`, `src/lib.rs`, `tools/*.py`, `tools/comparing/peers/NAME.py`,
`python tools/compare.py --gb 1`, `1234567`, `ringstow COMMAND`.
```
make test
ringstow ls run   # --deep is no flag here
```
"""


def problems(text):
    return [
        problem for code in check_docs.of_page(text, "a.md") for problem in check_docs.check(code)
    ]


def test_the_documentation_names_nothing_that_is_not_there():
    assert list(check_docs.problems(ROOT)) == []


@pytest.mark.parametrize(("text", "told"), WRONG.items(), ids=str)
def test_what_is_not_there_is_found(text, told):
    if "commit" in told and check_docs._exists("abc1234"):
        pytest.skip("git, or all of its history, is not here")
    assert problems(text)[:1] == [told]


def test_what_is_there_is_not_found():
    assert problems(RIGHT) == []


def test_a_line_is_named(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page").with_suffix(".md").write_text(
        "# A\n\n```python\nx = 1\n```\n\nSee `src/saves.rs`.\n"
    )
    module = tmp_path / "python" / "ringstow" / "a.py"
    module.parent.mkdir(parents=True)
    module.write_text('def a():\n    """Do it.\n\n    See ``ringstow.sav``.\n    """\n')
    assert list(check_docs.problems(tmp_path)) == [
        "docs/" + "page.md:7: no src/saves.rs",
        "python/ringstow/a.py:4: no ringstow.sav",
    ]


def test_a_figure_of_readme_that_no_page_measures_is_found(tmp_path):
    (tmp_path / "README.md").write_text("## Performance\n- A save: **2.3 s**. DCP 84.\n- 1.5 GB/s.")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "figures").with_suffix(".md").write_text("| 2.26 (1.4 to 2.3) |")
    assert list(check_docs.problems(tmp_path)) == [
        "README.md: no page of measurements has 1.5: - 1.5 GB/s."
    ]


def test_the_index_of_tools_names_each():
    index = (ROOT / "tools" / "README.md").read_text()
    tools = [path.name for end in ("py", "sh") for path in (ROOT / "tools").glob(f"*.{end}")]
    assert [name for name in tools if f"`{name}`" not in index] == []
