"""`ringstow report`: the page of a run has what is in it, and nothing of it runs."""

import html.parser
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import flip, python

import ringstow
from ringstow import _native
from ringstow._program._page import _charts, _cli, _html, _text
from ringstow._program._page._gather import gather

HOSTILE = '<script>alert("x")</script>&\u202e'


def state_of(step):
    return {
        "model": {"a": np.full(50_000, step), "b": np.ones(10_000), HOSTILE: np.ones(100)},
        "step": step,
        "note": HOSTILE,
    }


@pytest.fixture
def run(tmp_path):
    """Return a directory of five steps: the second lacks a file, and the third is damaged."""
    root = tmp_path / "run"
    with ringstow.CheckpointManager(root) as manager:
        for step in range(1, 6):
            manager.save(step, state_of(step), metrics={"loss": 1 / step, HOSTILE: math.inf})
    next((root / "step-00000002").glob("*.safetensors")).unlink()
    flip(next((root / "step-00000003").glob("*.safetensors")), -5)
    return root


class Page(html.parser.HTMLParser):
    """Every element of a page must be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.classes, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.classes += (dict(attrs).get("class") or "").split()
        assert not any(name.startswith("on") or name in ("href", "src") for name, _ in attrs)
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page_has_what_is_in_the_run_and_nothing_that_runs(run, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert _cli.main([str(run), "-o", str(out), "--verify"]) == 1
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "2 have problems: step-00000002, step-00000003" in said.err
    text = out.read_text()
    page = Page(text)
    assert "script" not in page.tags
    assert "http" not in re.sub("http-equiv", "", text)
    told = " ".join(page.texts)
    assert "step-00000002 is not a complete checkpoint" in told
    assert "crc32 of checksum chunk 0" in told
    assert "step-00000003 to step-00000004: not compared" in told  # it reads damage
    assert "step-00000004 to step-00000005: " in told
    assert "1 tensor changed (400 kB), 2 equal, 1 value changed" in told
    assert "\\u{202e}" in told
    assert "\u202e" not in text
    assert page.classes.count("tile") == 3
    assert page.classes.count("bar") == 3


def page_of(run, **options):
    """Return the text of the page of a run, whose elements are all closed."""
    text = _html.page(gather(run, **{"steps": 9, "changes": 0, "verifies": False, **options}))
    Page(text)
    return text


def test_page_without_verify_says_so_and_finds_what_is_missing(run):
    run_of = gather(run, steps=50, changes=10, verifies=False)
    assert [one.damage for one in run_of.checkpoints] == [None] * 5
    assert [bool(one.problem) for one in run_of.checkpoints] == [False, True, False, False, False]
    assert run_of.newest == "step-00000005"
    assert "ringstow report --verify" in _html.page(run_of)
    few = gather(run, steps=2, changes=0, verifies=False)
    assert (len(few.checkpoints), few.left_out, few.changes) == (2, 3, ())


def chart_of(text, title):
    [chart] = re.findall(rf'<svg [^>]*aria-label="{title}">.*?</svg>', text)
    return chart


def dots(chart):
    return re.findall(r'<circle class="dot"[^>]*><title>([^<]*)</title>', chart)


def test_metrics_of_removed_steps_are_drawn(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run", keep=2) as manager:
        for step in range(1, 6):
            manager.save(step, {"a": 1}, metrics={"loss": 1 / step})
        manager.save_async(10, {"a": 1}, metrics={"loss": math.nan, "best": 7}).result()
        manager.save(11, {"a": 1}, metrics={"loss": 0.01})
        manager.save(11, {"a": 1}, metrics={"loss": 0.02})
    text = page_of(tmp_path / "run", steps=50)
    chart = chart_of(text, "loss")
    assert dots(chart) == ["1: 1", "2: 0.5", "3: 0.3333", "4: 0.25", "5: 0.2", "11: 0.02"]
    places = [float(x) for x in re.findall(r'cx="([\d.]+)"', chart)]
    assert places[5] - places[4] > 5 * (places[1] - places[0])  # as far as their numbers
    assert dots(chart_of(text, "best")) == ["10: 7"]


def test_metrics_without_a_history_are_those_of_the_checkpoints(run):
    for file in run.glob(".ringstow-history*"):
        file.unlink()
    text = page_of(run, steps=3)
    assert dots(chart_of(text, "loss")) == ["3: 0.3333", "4: 0.25", "5: 0.2"]


def test_long_history_is_drawn_without_a_dot_for_each_save():
    values = [float(number % 7) for number in range(20_000)]
    values[100:103] = [math.nan, 3.0, math.nan]
    chart = _charts.line("loss", [str(number) for number in range(20_000)], values)
    assert dots(chart) == ["101: 3"]
    assert chart.count("<polyline") == 2
    assert len(chart) < 400_000


LONG = "finetune-of-the-large-model-with-a-long-name"


@pytest.mark.parametrize("count", [1, 3, 8, 60])
def test_labels_are_within_the_chart_and_keep_their_beginning(count):
    names = [f"{LONG}-{number}" for number in range(count)]
    chart = _charts.bars("bytes", [_charts.Bar(name, 1.0, "told") for name in names])
    found = re.findall(
        r'<text class="under" x="([\d.]+)"[^>]*>(?:<title>([^<]*)</title>)?([^<]*)<', chart
    )
    assert 1 <= len(found) <= 8
    end = 0.0
    for place, whole, text in found:
        begin, width = text.split("\u2026")[0], 6.4 * len(text)
        assert begin in LONG or begin in names
        assert text in names or whole in names
        assert end <= float(place) - width / 2 + 0.1
        end = float(place) + width / 2
        assert end <= _charts.WIDTH + 0.1
    assert (found[0][2] == names[0]) == (count == 1)


def test_name_in_a_tile_keeps_beginning_and_end():
    chart = _charts.treemap("tensors", [(f"model.{LONG}.weight", 99), *[("b", 1)] * 8])
    assert re.search(rf">model\.{LONG}\.weight</text>", chart)
    small = _charts.treemap("tensors", [(f"model.{LONG}.{n}.weight", 1) for n in range(30)])
    names = re.findall(r">([^<]*)</text>", small)
    assert names
    assert all(re.fullmatch("mod[^\u2026]*\u2026.*t", name) for name in names)


def test_line_break_of_an_error_is_a_line_break(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"a": 1, "note": "two\nlines"})
        with pytest.raises(ringstow.InvalidStateError) as caught:
            manager.save(2, {"a": object(), "b": object()})
        manager.save(2, {"a": 1, "note": "other\nlines"})
    assert "\n" in str(caught.value)
    text = page_of(tmp_path / "run", changes=9)
    assert "\\u{a}" not in text
    first, second = str(caught.value).split("\n")[:2]
    assert f"{_text.shown(first)}<br>{_text.shown(second)}" in text


def test_no_page_is_at_ease_above_a_failure(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"a": 1})
        at_ease = page_of(tmp_path / "run", changes=9)
        with pytest.raises(ringstow.InvalidStateError):
            manager.save(2, {"a": object()})
    text = page_of(tmp_path / "run", changes=9)
    assert 'class="good"' in at_ease
    assert 'class="good"' not in text
    assert "No checkpoint has a problem" not in text
    assert "Saves that failed" in text


def test_copies_that_have_not_ended_are_named(run, monkeypatch):
    monkeypatch.setattr(_native, "unfinished", lambda where: [(f"{where}/step-1", "s3://b/<x>")])
    assert "s3://b/&lt;x&gt;" in page_of(run)


def test_directory_without_checkpoints_is_an_error(tmp_path, capsys):
    out = tmp_path / "report.html"
    out.write_text("as it was")
    assert _cli.main([str(tmp_path), "-o", str(out)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    assert out.read_text() == "as it was"
    ringstow.save({"a": 1}, tmp_path / "step-1")
    assert _cli.main([str(tmp_path), "-o", str(tmp_path / "none" / "report.html")]) == 2
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        _cli.main([str(tmp_path), "--steps", "-1"])


def test_program_of_the_wheel_has_the_command(run, tmp_path):
    out = tmp_path / "report.html"
    code = "import sys; from ringstow._program._cli import main; sys.exit(main())"
    done = python(code, "report", run, "-o", out, "--changes", "0")
    assert done.returncode == 1, done.stderr
    Page(out.read_text())


def test_page_of_a_store_is_like_that_of_a_directory(bucket, tmp_path):
    ringstow.save(state_of(1), tmp_path / "step-1", step=1)
    ringstow.promote(tmp_path / "step-1", f"{bucket.url}/run/step-1")
    found = gather(f"{bucket.url}/run", steps=5, changes=5, verifies=True)
    assert [one.damage for one in found.checkpoints] == [()]
    assert {one.name for one in found.tensors} >= {"model.a", "model.b"}


@given(st.lists(st.integers(0, 10**12), max_size=60), st.integers(1, 2000), st.integers(1, 2000))
def test_tiles_have_the_areas_of_their_weights(weights, width, height):
    named = [(str(number), weight) for number, weight in enumerate(weights)]
    found = _charts.tiles(named, width, height)
    total = sum(weights)
    assert {tile.name for tile in found} == {name for name, weight in named if weight}
    for tile in found:
        area = width * height * tile.weight / total
        assert tile.width * tile.height == pytest.approx(area, rel=1e-6, abs=1e-6)
        assert -1e-6 <= tile.x <= tile.x + tile.width <= width * (1 + 1e-9)
        assert -1e-6 <= tile.y <= tile.y + tile.height <= height * (1 + 1e-9)


@given(st.text())
def test_any_text_is_escaped(text):
    seen = _text.shown(text)
    assert not set(seen) & set("<>\"'\n\0\u202e")
    seen.encode()  # also lone surrogates


@given(st.lists(st.floats(), max_size=30))
def test_any_values_make_a_chart(values):
    labels = [str(number) for number in range(len(values))]
    Page(_charts.line("any", labels, values))
    bars = [_charts.Bar(*pair, "told") for pair in zip(labels, values, strict=True)]
    Page(_charts.bars("any", bars))


def test_browser_shows_it_without_complaint(run, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium: apt-get install chromium")
    out = tmp_path / "report.html"
    _cli.main([str(run), "-o", str(out)])
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]
    command = [chromium, *flags, f"file://{out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert len(re.findall(r'<rect class="tile ', done.stdout)) == 3
    assert len(re.findall("<svg ", done.stdout)) >= 3
