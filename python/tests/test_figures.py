"""tools/figures.py: tables, drawings and the page from small data files, and what they lack."""

import importlib
import json
from xml.etree import ElementTree

import figures
import forked
import pytest
from drawing import model, page, plot, ranks, sharded, step_time, tensors
from drawing.plots import PLOTS
from support import ROOT

ORIGIN = {"command": "python tools/x.py", "machine": "a machine", "date": "2026-01-02"}


def count(number, seconds, failed, stopped=None):
    return {"tensors": number, "seconds": seconds, "failed": failed, "stopped": stopped or {}}


FEW = {"ringstow": {"save": [1.0, 3.0, 2.0], "load": [4.0]}, "dcp": {"save": [60.0]}}
LACKS, SLOW = {"torch_checkpointing": "no network"}, {"dcp": "save took more than 90 s"}
MANY = {"ringstow": {"save": [5.0]}, "dcp": {}}
OF_TENSORS = ORIGIN | {"counts": [count(10, FEW, LACKS), count(1000, MANY, LACKS, SLOW)]}

ROWS = {"dcp": 50.0, "distributed": 2.0, "planner first": 6.0, "reshard dcp": 40.0}
OF_SHARDED = ORIGIN | {"ranks": 2, "tensors": 1000}
OF_SHARDED |= {"measurements": [{"row": row, "seconds": value} for row, value in ROWS.items()]}

SIZES = dict.fromkeys(ranks.BYTES, 67.24)
SECONDS = {key: [0.1, 0.3] for key in ranks.SECONDS}
OF_RANK = {"tensors": 60, "chunks": 999_600, "bytes_per_chunk": SIZES, "seconds": SECONDS}
OF_RANKS = ORIGIN | {"ranks": [OF_RANK | {"ranks": number} for number in (1, 16, 16_384)]}

SUMMARY = {"ringstow": {"lost": [0.1, -0.2, 0.3], "save": [1.0, 1.0, 1.0]}}
SKIPPED = {"torch_checkpointing": "not installed: torch_checkpointing"}
OF_STEP_TIME = ORIGIN | {"gb": 1, "summary": SUMMARY, "skipped": SKIPPED, "failed": {}}

SPEEDS = {
    "torch.save": {"save_gb_s": [0.5, 0.4, 0.6]},
    "ringstow": {"save_gb_s": [2.0, 1.0, 3.0], "load_gb_s": [4.0, 4.0, 4.0]},
}
OF_MODEL = ORIGIN | {"summary": SPEEDS, "failed": {"fio": "no fio here"}, "stopped": {}}

STEPS = ("ringstow.save_async", "seconds of training lost by a save of 1 GB")
# By the names of the plots, with what their drawings say.
SAMPLES = {
    "tensors": (OF_TENSORS, ("ringstow", "dcp", "durable save, seconds")),
    "llama3-8b": (OF_MODEL, ("ringstow", "torch.save", "durable save, GB/s")),
    "sharded": (
        OF_SHARDED,
        ("ringstow.distributed", "1,000 sharded tensors, save by 2 ranks, seconds"),
    ),
    "ranks": (OF_RANKS, ("16,384", "seconds, 1,000,000 chunks")),
    "short-steps": (OF_STEP_TIME, STEPS),
    "step-time": (OF_STEP_TIME, STEPS),
}


def test_tensors_table_has_a_column_for_each_number():
    assert tensors.table(OF_TENSORS) == [
        ["seconds, tensors", "10", "1,000"],
        ["ringstow, save", "2 (1 to 3)", "5"],
        ["dcp, save", "60", ""],
        ["ringstow, load", "4", ""],
    ]


def test_tensors_names_slow_failed_and_absent_peers():
    assert tensors.missing(OF_TENSORS) == [
        "torch_checkpointing: no network (10, 1,000 tensors)",
        "dcp: save took more than 90 s (1,000 tensors)",
        "ringstow-into: not measured",
        "safetensors: not measured",
        "torch.save: not measured",
    ]


def test_sharded_table_and_what_it_lacks():
    assert sharded.table(OF_SHARDED)[1:] == [
        ["save by 2 ranks", "DCP", "50"],
        ["", "ringstow's SavePlanner, first save", "6"],
        ["", "ringstow.distributed", "2"],
        ["load by one process of what 2 ranks saved", "DCP", "40"],
    ]
    told = sharded.missing(OF_SHARDED)
    assert [line.partition(":")[0] for line in told] == list(sharded.groups(OF_SHARDED))
    assert told[-1].endswith(": ringstow's LoadPlanner; ringstow.distributed")


def test_ranks_table_and_what_it_lacks():
    table = ranks.table(OF_RANKS)
    assert table[0] == ["simulated ranks", "1", "16", "16,384"]
    assert table[2][1:] == ["0.2 (0.1 to 0.3)"] * 3
    assert table[-1] == ["bytes per chunk in memory, most while merging", *["67.2"] * 3]
    assert ranks.missing(OF_RANKS) == ["256, 4,096 ranks: not measured"]
    assert ranks.chunks(OF_RANKS) == "1,000,000"


def test_step_time_table_and_what_it_lacks():
    label = "ringstow.save_async"
    assert step_time.table(OF_STEP_TIME)[1:] == [[label, "0.1 (-0.2 to 0.3)", "1"]]
    told = step_time.PLOT.missing(OF_STEP_TIME)
    assert "torch_checkpointing, process: not installed: torch_checkpointing" in told
    assert "dcp.async_save, thread: not measured" in told
    assert "dcp.async_save with DefaultStager: not measured" in step_time.SHORT.missing(
        OF_STEP_TIME
    )


def test_model_table_has_the_fastest_first_and_what_it_lacks():
    assert model.table(OF_MODEL) == [
        ["by", "durable save, GB/s", "cold load, GB/s"],
        ["ringstow", "2 (1 to 3)", "4"],
        ["torch.save", "0.5 (0.4 to 0.6)", ""],
    ]
    assert model.missing(OF_MODEL)[0] == "fio, a file of this size: no fio here"


def test_numbers_have_three_significant_digits():
    numbers = {0: "0", 0.01234: "0.0123", 1.005: "1", 20.04: "20", 99.96: "100", 12345.6: "12,346"}
    assert [plot.rounded(number) for number in numbers] == list(numbers.values())


@pytest.mark.parametrize("one", PLOTS, ids=lambda one: one.name)
def test_drawing_names_each_row_and_repeats_byte_for_byte(one):
    data, labels = SAMPLES[one.name]
    image = plot.svg(one.draw(data))
    text = " ".join(ElementTree.fromstring(image).itertext())
    for label in labels:
        assert label in text
    assert image == plot.svg(one.draw(data))


def page_with_markers(*names):
    lines = ["# Head", *(line for name in names for line in page.markers(name)), "the end\n"]
    return "\n".join(lines)


def run(at):
    return forked.script(
        ROOT / "tools/figures.py", "--data", at, "--page", at / "page.md", check=True
    )


def test_page_has_plots_that_have_data_and_says_how_to_measure_others(at):
    (at / "page.md").write_text(page_with_markers(*(one.name for one in PLOTS)))
    (at / "tensors.json").write_text(json.dumps(OF_TENSORS))
    done = run(at)
    assert "not in the plot: safetensors: not measured" in done.stdout
    assert "because there is no ranks.json: python tools/bench_ranks.py" in done.stdout
    text = (at / "page.md").read_text()
    assert text.startswith("# Head\n")
    assert text.endswith("the end\n")
    assert (
        "![Seconds of a save and of a load against the number of tensors](figures/tensors.svg)"
        in text
    )
    assert "`python tools/x.py`, a machine, 2026-01-02." in text
    assert "| dcp, save | 60 |  |" in text
    assert "- safetensors: not measured" in text
    assert text.count("Not measured yet: `python tools/") == len(PLOTS) - 1
    assert sorted(path.name for path in at.iterdir()) == ["page.md", "tensors.json", "tensors.svg"]
    run(at)
    assert (at / "page.md").read_text() == text


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_unreadable_data_file_is_named_with_the_command(at, content):
    (at / "tensors.json").write_text(content)
    one = PLOTS[0]
    with pytest.raises(figures.NotDrawn, match=r"tensors\.json is not .* python tools/compare\.py"):
        figures.draw(one, figures.read(one, at), at)


def test_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="add them"):
        page.filled("# Head\n", {"tensors": "text"})


def test_each_command_is_a_tool_of_the_tree_that_writes_the_data_file():
    for one in PLOTS:
        _, tool, *options = one.command.split()
        assert (ROOT / tool).is_file()
        assert options[-2:] == ["--json", f"docs/figures/{one.name}.json"]


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the documentation is not here")
def test_published_page_is_up_to_date_with_its_data():
    text = figures.DOCS.joinpath("figures.md").read_text()
    data = {one: figures.read(one, figures.DOCS / "figures") for one in PLOTS}
    parts = {one.name: page.rendered(one, found) for one, found in data.items()}
    assert page.filled(text, parts) == text, "run `make figures`"
    for one, found in data.items():
        assert (figures.DOCS / "figures" / f"{one.name}.svg").exists() == (found is not None)


def test_rows_drawn_are_rows_measured():
    compare_dcp = importlib.import_module("compare_dcp")
    contenders = importlib.import_module("stepping.contenders")
    peers = importlib.import_module("comparing.peers")
    drawn = {**sharded.SAVES, **sharded.LOADS, **sharded.RESHARDED}
    assert set(drawn) <= set(compare_dcp.PLANNING_ROWS)
    assert {name.partition(":")[0] for name in step_time.LABELS} <= set(contenders.PLAIN)
    assert set(tensors.STYLES) <= set(peers.PEERS)
