"""tools/sweep.py: its plan, its choice, its files, and its behaviour at failures."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
import typing

import forked
import numpy
import pytest
import sweep
from support import ROOT
from sweeping import choose, measure, plan, plots, render
from sweeping.plan import AGAIN, DEFAULT, FIO, Setting

import ringstow

OF_CONFIG = {field.name: field.default.value for field in dataclasses.fields(ringstow.Config)}
OF_CONFIG |= {"block_bytes": 4 << 20}
# Of the plain saves that are measured.
DEFAULTS = OF_CONFIG | {"pool_bytes": 256 << 20}
DOES = {"engine": "uring", "direct": "on", "fixed": "on", "fillers": 2}


def knobs(wanted=(), types=None, cores=2):
    types = types or typing.get_type_hints(ringstow.Config)
    return plan.knobs_of(types, DEFAULTS | {"sqpoll": "auto"}, DOES, cores, wanted)


# --- the plan ----------------------------------------------------------------------------------


def test_default_is_not_measured_twice():
    levels = {knob.name: knob.levels for knob in knobs()}
    assert "uring" not in levels["engine"]
    assert "portable" in levels["engine"]
    assert (levels["direct"], levels["fixed"]) == (("off",), ("off",))
    assert levels["fillers"] == (1, 4)
    assert levels["recycle"] == (True,)
    assert 4 << 20 not in levels["block_bytes"]


def test_new_config_switch_is_swept():
    types = {"sqpoll": typing.Literal["auto", "on", "off"]}
    assert [knob.levels for knob in knobs(types=types)] == [("on", "off")]


def test_unknown_knob_is_named():
    assert [knob.name for knob in knobs(["queue_depth"])] == ["queue_depth"]
    with pytest.raises(plan.NoPlan, match="que_depth"):
        knobs(["que_depth"])


def test_grid_excludes_settings_beyond_the_pool():
    cells = plan.grid(knobs(), 256 << 20)
    assert len(cells) == len(set(cells)) == 5 * 5 - 1 - 1
    assert DEFAULT not in cells
    assert Setting.of({"block_bytes": 16 << 20, "queue_depth": 32}) not in cells


def test_round_has_each_setting_once_per_block():
    settings = plan.one_by_one(knobs())
    blocks = plan.blocks(settings, True, random.Random(1))
    assert all(block.count(DEFAULT) == 1 for block in blocks)
    assert all(len(block) <= 1 + plan.OTHERS_IN_A_BLOCK for block in blocks)
    others = [setting for block in blocks for setting in block if setting != DEFAULT]
    assert sorted(map(str, others)) == sorted(map(str, [*settings, AGAIN, FIO]))
    assert sum(map(len, blocks)) == plan.round_length(len(settings), True)
    assert blocks != plan.blocks(settings, True, random.Random(2))


@pytest.mark.parametrize("minutes", [4, 6, 10, 60])
def test_the_plan_fits_the_time(minutes):
    made = plan.make(knobs(), 256 << 20, minutes * 60, 1.5, True)
    assert sum(phase.seconds for phase in made.phases) <= minutes * 60
    assert all(phase.rounds >= plan.LEAST_ROUNDS[phase.name] for phase in made.phases)
    assert made.grid is not None


def test_too_little_time_error_names_enough_time():
    with pytest.raises(plan.NoPlan, match=r"--minutes \d"):
        plan.make(knobs(), 256 << 20, 20, 1.5, False)
    with pytest.raises(plan.NoPlan) as refused:
        plan.make(knobs(), 256 << 20, 20, 1.5, True)
    enough = float(str(refused.value).split("--minutes ")[1].split()[0])
    assert plan.make(knobs(), 256 << 20, enough * 60, 1.5, True)


def test_refused_settings_are_not_planned():
    refused = Setting.of({"direct": "off"})
    made = plan.make(knobs(), 256 << 20, 600, 1.0, False, [refused])
    assert refused not in made.one_by_one.settings


# --- the choice --------------------------------------------------------------------------------


def measured(setting, phase, block, save, load=1.0):
    def result(speed):
        return {"bytes": 1e9, "seconds": 1 / speed, "cpu_seconds": 0.1, "staged_seconds": 0.1}

    return choose.Measured(setting, phase, block, block, result(save), result(load))


def rounds(dice, phase, speeds, count, noise=0.05):
    """Return rounds on a disk whose speed drifts tenfold, at constant ratios of the settings."""
    found = []
    for block in range(count):
        mood = 10 ** dice.uniform(-0.5, 0.5)
        for setting, speed in [(DEFAULT, 1.0), *speeds.items()]:
            got = [mood * speed * dice.lognormal(0, noise) for _ in range(2)]
            found.append(measured(setting, phase, (phase, block), *got))
    return found


FAST, SAME = Setting.of({"queue_depth": 16}), Setting.of({"queue_depth": 4})


def test_faster_setting_is_found_on_a_drifting_disk():
    found = rounds(numpy.random.default_rng(1), "final", {FAST: 1.2, SAME: 1.0}, 8)
    verdict = choose.verdict(found, "both")
    assert verdict.setting == FAST
    assert verdict.figures[FAST].median == pytest.approx(1.2, abs=0.06)


def test_forty_equal_settings_rarely_beat_the_default():
    wrong = 0
    for seed in range(100):
        dice = numpy.random.default_rng(seed)
        equals = {Setting.of({"queue_depth": depth}): 1.0 for depth in range(10, 50)}
        found = rounds(dice, "one by one", equals, 3, noise=0.2)
        best = choose.finalists(found, [], "both")
        assert len(best) <= plan.FINALISTS
        final = rounds(dice, "final", dict.fromkeys(best, 1.0), 7, noise=0.2)
        wrong += choose.verdict(found + final, "both").setting != DEFAULT
    assert wrong <= 8


def test_too_few_rounds_of_the_final_keep_the_default():
    found = rounds(numpy.random.default_rng(1), "final", {FAST: 2.0}, 4)
    verdict = choose.verdict(found, "both")
    assert verdict.setting == DEFAULT
    assert "fewer than 5 rounds" in verdict.why
    assert choose.verdict([], "both").setting == DEFAULT


def test_goal_selects_the_speed():
    found = [measured(DEFAULT, "final", block, 1.0, 1.0) for block in range(6)]
    found += [measured(FAST, "final", block, 1.5, 0.5) for block in range(6)]
    chosen = {goal: choose.verdict(found, goal).setting for goal in ("save", "load", "both")}
    assert chosen == {"save": FAST, "load": DEFAULT, "both": DEFAULT}


def test_incompatible_settings_are_not_combined():
    speeds = {
        Setting.of({"engine": "portable"}): 1.2,
        Setting.of({"fixed": "on"}): 1.2,
        Setting.of({"fillers": 4}): 0.9,
        Setting.of({"block_bytes": 16 << 20}): 1.1,
        Setting.of({"block_bytes": 16 << 20, "queue_depth": 16}): 1.3,
    }
    found = rounds(numpy.random.default_rng(1), "grid", speeds, 5, noise=0.01)
    types = typing.get_type_hints(ringstow.Config)
    turned = plan.knobs_of(types, DEFAULTS, DOES | {"fixed": "off"}, 2)
    together = choose.combined(found, turned, "both")
    expected = {"engine": "portable", "block_bytes": 16 << 20, "queue_depth": 16}
    assert dict(together.changes) == expected


# --- the output --------------------------------------------------------------------------------


def results(setting, changed=2.0, ended=""):
    speeds = [(DEFAULT, 1.0), (AGAIN, 1.0), (setting, changed)]
    found = [measured(s, "final", b, speed) for b in range(6) for s, speed in speeds]
    found += [measured(s, "grid", 9, 1.0) for s in (DEFAULT, FAST)]
    return render.Results(
        command="python tools/sweep.py '<a&b>'",
        machine="2 x CPU",
        date="2026-11-21",
        goal="both",
        state_bytes=10**9,
        seed=0,
        load_average=0.5,
        defaults=DEFAULTS,
        knobs=knobs(),
        found=found,
        seconds=60,
        ended=ended,
    )


BEST = Setting.of(
    {"block_bytes": 8 << 20, "queue_depth": 32, "engine": "portable", "direct": "off"}
)


@pytest.fixture
def best_file(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("RINGSTOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ringstow.toml"
    path.write_text(render.as_toml(results(BEST)))
    return path


def test_python_takes_the_setting_from_the_file(best_file, monkeypatch, tmp_path):
    config = dataclasses.asdict(ringstow.Config())
    assert config == {**OF_CONFIG, **dict(BEST.changes)}
    report = ringstow.save({"a": 1}, tmp_path / "ckpt")
    assert (report.engine, report.direct) == ("portable", False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert ringstow.Config().queue_depth == 8
    monkeypatch.setenv("RINGSTOW_CONFIG", str(best_file))
    assert ringstow.Config().queue_depth == 32


def test_the_program_takes_the_setting_from_the_file(best_file):
    words = ["bench", ".", "--json", "--gb", "0.001", "--rounds", "1", "--queue-depth", "4"]
    told = json.loads(forked.ringstow(*words, cwd=best_file.parent, check=True).stdout)
    # An explicit setting overrides the file.
    assert told["config"].items() >= {**dict(BEST.changes), "queue_depth": 4}.items()
    assert told["moved"]["engine"] == "portable"


def test_default_verdict_writes_a_file_without_changes(tmp_path, monkeypatch):
    text = render.as_toml(results(BEST, changed=1.0, ended="failed:\nqueue_depth = 3\r\nx = 1"))
    assert "nothing was certainly faster" in text
    (tmp_path / "ringstow.toml").write_text(text)
    monkeypatch.setenv("RINGSTOW_CONFIG", str(tmp_path / "ringstow.toml"))
    config = dataclasses.asdict(ringstow.Config())
    assert {name: config[name] for name in DEFAULTS} == OF_CONFIG


def test_page_is_self_contained():
    told = results(BEST)
    page = render.as_html(told, plots.heat_map(told), plots.knob_plot(told))
    assert page.count('src="data:image/') == page.count("src=") == 2
    assert "http" not in page
    assert "&lt;a&amp;b&gt;" in page
    assert "2.00 (2.00-2.00)" in "\n".join(render.table(told))


# --- complete runs -----------------------------------------------------------------------------

FEW = ["--gb", "0.01", "--seed", "1", "--knobs", "queue_depth"]


@pytest.fixture
def least(monkeypatch):
    """Reduce every minimum, so that a sweep takes seconds."""
    monkeypatch.setattr(plan, "LEAST_ROUNDS", dict.fromkeys(plan.LEAST_ROUNDS, 1))
    monkeypatch.setattr(measure.Sweep, "calibrate", lambda self, fio: 0.01)
    make = plan.make
    # A busy machine has used up the time before anything is measured.
    monkeypatch.setattr(plan, "make", lambda a, b, left, *rest: make(a, b, max(left, 2.0), *rest))
    levels = {"block_bytes": (1 << 20, 4 << 20), "queue_depth": (2, 8)}
    monkeypatch.setattr(plan, "NUMBERS", levels)


def leftovers(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith(".ringstow")]


def test_sweep_writes_all_its_files(least, tmp_path, capsys):
    out = tmp_path / "out"
    words = [*FEW, "block_bytes", "--minutes", "0.04", "--out", str(out)]
    assert sweep.main([str(tmp_path), *words]) == 0
    told = capsys.readouterr().out
    assert "Plan:" in told
    assert "To be used:" in told
    files = {"results.json", "heatmap.png", "report.html", "ringstow.toml"}
    assert {path.name for path in out.iterdir()} == files
    found = json.loads((out / "results.json").read_text())
    assert {m["phase"] for m in found["measurements"]} >= {"one by one", "grid"}
    assert all(m["save"]["bytes"] >= 9e6 for m in found["measurements"])
    assert found["ended"] == ""
    assert leftovers(tmp_path) == []


def test_plan_option_measures_nothing(least, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert sweep.main([str(tmp_path), *FEW, "--minutes", "1", "--plan"]) == 0
    told = capsys.readouterr().out
    assert "no fio here" in told
    assert "settings x" in told
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_keeps_measured_rounds(tmp_path):
    out = tmp_path / "out"
    surroundings = {**os.environ, "RINGSTOW_QUEUE_DEPTH": "3", "PATH": ""}
    words = [tmp_path, *FEW, "--out", out, "--minutes", "10"]
    running = forked.Program(
        forked.SCRIPT, *words, name=ROOT / "tools" / "sweep.py", env=surroundings
    )
    deadline = time.monotonic() + 300
    while not (out / "results.json").exists():
        assert running.is_running()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)  # into the second round
    running.send_signal(signal.SIGINT)
    done = running.wait()
    told = done.stdout
    assert done.returncode == 130, done.stderr
    assert "Not complete: stopped by Ctrl-C" in told
    assert "no fio here" in told
    found = json.loads((out / "results.json").read_text())
    assert {m["round"] for m in found["measurements"]} >= {0}
    assert all(m["load"]["seconds"] > 0 for m in found["measurements"])
    assert found["defaults"]["queue_depth"] == 8  # not the environment's value
    assert found["chosen"] == {}
    assert "stopped by Ctrl-C" in (out / "ringstow.toml").read_text()
    assert (out / "report.html").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("gb", ["0", "-1", "nan", "inf", "1e-10"])
def test_invalid_size_is_refused(gb, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main([str(tmp_path), f"--gb={gb}"])
    assert ended.value.code == 2
    assert "--gb" in capsys.readouterr().err


def refused(capsys, directory, out, *words):
    assert sweep.main([str(directory), "--out", str(out), *words]) == 2
    return capsys.readouterr().out


def test_invalid_directory_is_named(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    for bad in (file, tmp_path / "none"):
        assert f"{bad} is not a directory" in refused(capsys, bad, tmp_path / "out")
    assert f"--out {file}" in refused(capsys, tmp_path, file)


def test_too_little_memory_fails_before_allocation(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "meminfo_bytes", lambda field: 1 << 30)
    said = refused(capsys, tmp_path, tmp_path / "out", "--gb", "0.5")
    assert "choose a smaller --gb" in said


@pytest.fixture
def small_disk(mount):
    return mount("size=300M")


def test_too_small_disk_fails_before_measuring(small_disk, tmp_path, capsys):
    said = refused(capsys, small_disk, tmp_path / "out", "--gb", "0.1")
    assert "choose a smaller --gb" in said
    assert list(small_disk.iterdir()) == []


def test_full_disk_keeps_measured_rounds(least, small_disk, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(plan.LEAST_ROUNDS, "one by one", 2)
    kept = sweep.write_json

    def fill(given, out):
        kept(given, out)
        if not (small_disk / "ballast").exists():
            with (small_disk / "ballast").open("wb") as file:
                full = False
                while not full:  # the kernel frees a removed file's space a little later
                    with contextlib.suppress(OSError):
                        os.posix_fallocate(file.fileno(), 0, 299 << 20)
                        full = True

    monkeypatch.setattr(sweep, "write_json", fill)
    out = tmp_path / "out"
    assert "No space left" in refused(capsys, small_disk, out, *FEW, "--minutes", "0.04")
    found = json.loads((out / "results.json").read_text())
    assert "No space left" in found["ended"]
    assert found["measurements"]
    assert leftovers(small_disk) == []
