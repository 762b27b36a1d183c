"""tools/step_time.py: the time lost, rows for all contenders, and a small run."""

import importlib.util
import json
import statistics

import forked
import pytest
import step_time
from stepping import gil, report
from stepping.contenders import PLAIN
from stepping.training import Turn
from support import ROOT

DEFAULT = [name for name, row in PLAIN.items() if row.by_default]


# The tool, which counts one contender in a process of its own, as it does each, and the others in
# its own process.
IN_ONE_PROCESS = """
import contextlib, sys
import step_time
from comparing.directories import fresh_directory
from stepping import contenders, gil
in_a_new_process = step_time.gil_of
def gil_of(name, options):
    if name == "ringstow":
        return in_a_new_process(name, options)
    with fresh_directory(options.dir) as directory:
        counted = gil.measure(name, options.gb * 1e9, directory)
        if name == "ringstow-manager":  # it may still remove the first save
            contenders.manager_in(directory / "managed")[0].close()
    return counted
step_time.gil_of = gil_of
gil.IDLE_SECONDS = 0.1
closing, step_time.closing = step_time.closing, contextlib.nullcontext()
with closing:  # what a contender keeps between saves, also until the count
    sys.exit(step_time.main())
"""


def run(*arguments, code=forked.SCRIPT):
    return forked.python(code, *arguments, name=ROOT / "tools" / "step_time.py")


def test_lost_time_is_the_call_and_what_steps_took_beyond_the_median():
    turn = Turn(quiet=[1.0, 1.0, 9.0], blocked=0.5, steps=[2.0, 1.5], save=3.0)
    assert turn.lost == 0.5 + 1.0 + 0.5
    assert turn.slowdown == 1.75


def test_save_without_steps_loses_its_call():
    turn = Turn(quiet=[1.0], blocked=0.5, steps=[], save=0.5)
    assert (turn.lost, turn.slowdown) == (0.5, None)


def test_ratio_is_taken_within_a_round():
    def turn(lost):
        return Turn([1.0], lost, [], lost)

    found = report.Found(PLAIN, "dcp-thread")
    found.turns = [
        {"ringstow": turn(1.0), "dcp-thread": turn(4.0)},
        {"ringstow": turn(1.0), "dcp-thread": turn(2.0)},
        {"ringstow": turn(1.0)},
    ]
    assert found.ratios("ringstow") == [0.25, 0.5]


def test_time_that_is_neither_running_nor_queued_is_without_the_gil():
    shares = gil.shares(gil.Reading(0, 10.0, 1.0, 0.5), gil.Reading(800, 14.0, 2.0, 1.5))
    assert shares == {"seconds": 4.0, "rate": 200.0, "no_core": 0.25, "no_gil": 0.5}


SMALL = ("--gb", 0.01, "--rounds", 1, "--steps", 2)


def test_small_run_has_every_contender_and_its_figures_add_up(tmp_path):
    answer = tmp_path / "result.json"
    done = run(*SMALL, "--dir", tmp_path, "--json", answer, code=IN_ONE_PROCESS)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(answer.read_text())
    starts = {line.split(" ")[0] for line in done.stdout.splitlines()}
    assert set(DEFAULT) <= starts
    measured = told["rounds"][0]
    assert set(measured) | set(told["skipped"]) == set(DEFAULT)
    for name, turn in measured.items():
        assert len(turn["quiet"]) == 2
        assert turn["median"] == statistics.median(turn["quiet"])
        longer = sum(step - turn["median"] for step in turn["steps"])
        assert turn["lost"] == pytest.approx(turn["blocked"] + longer)
        assert turn["save"] >= turn["blocked"] if PLAIN[name].in_background else not turn["steps"]
        assert told["summary"][name]["lost"] == [turn["lost"]] * 3
    assert set(told["gil"]) == {name for name in measured if PLAIN[name].in_background}
    for counted in told["gil"].values():
        assert counted["saving"]["rate"] > 0
        assert 0 <= counted["saving"]["no_gil"] <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_contender_that_is_not_installed_is_skipped_with_the_reason(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch_checkpointing" else find(name, *rest),
    )
    answer = tmp_path / "result.json"
    wanted = ["--contenders", "torch.save", "torch_checkpointing", "--no-gil", "--json", answer]
    small = ["--gb", 0.01, "--rounds", 1, "--steps", 1, "--dir", tmp_path]
    assert step_time.main([str(word) for word in [*small, *wanted]]) == 0
    reason = "not installed: torch_checkpointing"
    assert json.loads(answer.read_text())["skipped"] == {"torch_checkpointing": reason}
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines if reason in line] == [
        f"torch_checkpointing skipped: {reason}"
    ]


def test_contender_that_fails_has_the_reason_and_the_tool_fails(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise OSError("no such disk\nsecond line")

    broken = PLAIN["torch.save"].__class__((), "own", fail)
    monkeypatch.setitem(PLAIN, "torch.save", broken)
    wanted = ["--contenders", "torch.save", "--no-gil", "--gb", "0.01", "--dir", str(tmp_path)]
    assert step_time.main(wanted) == 1
    assert "FAILED: OSError: no such disk\n" in capsys.readouterr().out


def test_unknown_contender_is_refused_with_the_known_ones(tmp_path):
    done = run("--contenders", "nobody", "--dir", tmp_path)
    assert done.returncode == 1
    assert "no contender nobody; there are ringstow, " in done.stdout
