"""tools/compare.py: figures from measurements, failing peers, and a small run."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import compare as compare_tool
import forked
import pytest
import torch
from comparing import (
    chart,
    counts,
    durable,
    environments,
    measuring,
    processes,
    state,
    table,
    usage,
    worker,
)
from comparing.peers import PEERS
from support import ROOT

TOOLS = ROOT / "tools"


def row(save_seconds, load_seconds=None, **more):
    found = {"save": {"bytes": 1e9, "seconds": save_seconds, "cpu_seconds": 1.0, **more}}
    if load_seconds is not None:
        found["load"] = {"bytes": 1e9, "seconds": load_seconds, "cpu_seconds": 1.0}
    return found


@pytest.fixture
def rounds():
    found = measuring.Rounds(["ringstow", "torch.save", "deepspeed", "fio"])
    found.done = [
        {"ringstow": row(1, 2), "torch.save": row(4, 4), "fio": row(2, 1)},
        {"ringstow": row(2, 2), "torch.save": row(4, 8), "fio": row(1, 1)},
    ]
    found.failed["deepspeed"] = "no libaio"
    return found


def test_ratios_are_taken_within_a_round_that_has_both_rows(rounds):
    assert table.ratios(rounds, "save", "ringstow", ["fio"]) == [2.0, 0.5]
    assert table.ratios(rounds, "load", "ringstow", ["torch.save"]) == [2.0, 4.0]
    del rounds.done[0]["fio"]
    assert table.ratios(rounds, "save", "ringstow", ["fio"]) == [0.5]


def test_load_ratio_is_to_the_best_load_of_its_kind():
    def load(seconds):
        return {"load": {"bytes": 10**9, "seconds": seconds}}

    names = ["ringstow", "ringstow-into", "safetensors", "dcp"]
    found = measuring.Rounds(names)
    found.done = [dict(zip(names, map(load, [1.0, 0.5, 2.0, 4.0]), strict=True))]
    best = list(table.ratio_lines(found))[1]
    assert "load 2.00" in best
    assert "load into 8.00" in best


def test_every_row_shows_which_side_synced_and_a_failed_one_the_reason(rounds):
    lines = {line.split()[0]: line for line in table.rows(rounds)}
    assert lines["torch.save"].endswith("added")
    assert lines["ringstow"].endswith("own")
    assert table.made_durable_by("fastsafetensors") == "-"
    assert lines["deepspeed"] == f"{'deepspeed':<25} FAILED no libaio"


def test_warm_load_is_named(rounds):
    assert table.warm_loads(rounds) == []
    rounds.done[1]["torch.save"]["load"]["cached_bytes_before"] = 5e8
    assert table.warm_loads(rounds) == ["torch.save"]


def test_summary_and_chart_have_the_same_order(rounds):
    summary = table.summary(rounds)
    assert summary["torch.save"]["save_gb_s"] == [0.25, 0.25, 0.25]
    assert [name for name, _ in chart.bars(summary, "save")] == ["torch.save", "ringstow", "fio"]
    assert chart.label("torch.save", summary["torch.save"], "save").endswith("*")


def test_share_of_a_model_has_about_the_bytes_that_are_asked_for():
    shapes = dict(state.llama3_8b())
    assert sum(math.prod(shape) for shape in shapes.values()) == 8_030_261_248
    share = state.make_llama_share(200_000_000)
    assert len(share) == 4 * len(shapes) == 1164
    assert sum(tensor.nbytes for tensor in share.values()) == pytest.approx(200e6, rel=0.1)
    assert share["model.embed.weight"].shape[1] == 4096


def test_small_state_has_only_small_tensors():
    small = state.make_small_state(1_000_000)
    assert {tensor.nbytes for tensor in small.values()} == {4096}
    assert len(small) == 244
    again, other = state.make_small_state(1_000_000), state.make_small_state(1_000_000, seed=1)
    assert state.digest(small) == state.digest(again) != state.digest(other)


def test_each_round_starts_with_another_row():
    assert {measuring.in_turn(["a", "b", "c"], number)[0] for number in range(3)} == {"a", "b", "c"}


def test_failed_peer_is_not_retried_others_continue():
    rounds = measuring.Rounds(["good", "bad"])
    tried = []

    def measure(name, number):
        tried.append(name)
        if name == "bad":
            raise processes.CompareFailed("broken")
        return row(1)

    list(measuring.measure_rounds(rounds, 2, measure))
    assert tried.count("bad") == 1
    assert [set(done) for done in rounds.done] == [{"good"}, {"good"}]
    assert rounds.failed == {"bad": "broken"}


def test_interrupted_round_keeps_earlier_rounds():
    rounds = measuring.Rounds(["one", "two"])

    def measure(name, number):
        if (name, number) == ("two", 1):
            raise KeyboardInterrupt
        return row(1)

    with pytest.raises(KeyboardInterrupt):
        list(measuring.measure_rounds(rounds, 3, measure))
    assert [set(done) for done in rounds.done] == [{"one", "two"}]


def test_every_file_is_synced_before_its_directory(at, monkeypatch):
    (at / "c" / "inner").mkdir(parents=True)
    for name in ("c/a", "c/inner/b"):
        (at / name).write_bytes(b"x")
    synced = []
    monkeypatch.setattr(durable, "fsync_path", synced.append)
    durable.fsync_tree(at / "c")
    inner = [at / "c/inner/b", at / "c/inner", at / "c/a", at / "c", at]
    assert synced == inner


@pytest.mark.parametrize("size", [0, 1, 4096, 100_000])
def test_cached_bytes_counts_a_written_file(at, size):
    (at / "file").write_bytes(b"x" * size)
    assert durable.cached_bytes(at) == -(-size // durable.PAGE_BYTES) * durable.PAGE_BYTES


def test_environments_differ_by_packages_and_pytorch():
    names = {
        environments.environment_name(requirements, constraints)
        for requirements in (("a==1",), ("a==2",))
        for constraints in (["torch==2.11"], ["torch==2.15"])
    }
    assert len(names) == 4
    assert all(name.startswith("a-") for name in names)
    assert environments.environment_name(("a>=1",), []).startswith("a-")


def test_pip_reason_is_one_line_with_the_conflict():
    output = """Collecting a
ERROR: Cannot install a==1 because these package versions have conflicting dependencies.

The conflict is caused by:
    a 1 depends on torch<2.0
    The user requested (constraint) torch==2.15.0
ERROR: ResolutionImpossible: for help visit the documentation
"""
    reason = environments.pip_reason(output)
    assert reason.startswith("ERROR: Cannot install a==1")
    assert reason.endswith("a 1 depends on torch<2.0")
    assert "\n" not in reason


def test_created_environment_sees_the_projects_packages(at):
    python = environments.create(at / "one")
    command = [str(python), "-c", "import pytest, sys; print(sys.prefix)"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(at / "one")


def test_timeout_ends_a_peer_and_its_children(at):
    child = "import time; time.sleep(600)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
    parent += f"open({str(at / 'pid')!r}, 'w').write(str(p.pid)); p.wait()"
    for limit in (2.0, 20.0, 200.0):  # until it has started its child
        with pytest.raises(processes.CompareFailed, match="not done within"):
            processes.run_kept([sys.executable, "-c", parent], at / "log", limit)
        if (at / "pid").exists():
            break
    pid = int((at / "pid").read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        return usage.stat_fields(pid)[0] != "Z"
    except OSError:
        return False


def test_the_answer_is_the_last_json_line():
    assert processes.last_json('{"a": 1}\nnoise\n{"b": 2}\n{not json\n') == {"b": 2}
    assert processes.last_json("noise") is None


def test_cpu_time_of_a_running_child_counts():
    before = usage.cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 300
        while usage.cpu_seconds() < before + 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert child.pid in usage.descendants()
    finally:
        child.kill()
        child.wait()


def test_loads_as_names_an_existing_row():
    for peer in PEERS.values():
        assert peer.loads_as is None or PEERS[peer.loads_as].loads_as is None
        assert peer.begin is not None or peer.load is not None


def test_tools_own_loop_does_not_count_as_loading():
    assert worker.without_loop(load=1.0, touch=0.5, again=0.5) == 1.0  # everything was read
    assert worker.without_loop(load=0.1, touch=2.5, again=0.5) == 2.1  # everything was mapped
    assert worker.without_loop(load=1.0, touch=0.1, again=0.5) == 1.0  # never below the load


def test_loaded_tensors_are_touched_again_outside_the_load(at, monkeypatch):
    touched = []
    monkeypatch.setattr(worker, "touch", lambda state: touched.append(set(state)))
    peer = PEERS["torch.save"]
    worker.measure_save(peer, at, {"a": torch.ones(2)}, "cpu", lambda: None, 100)
    loaded = worker.measure_load(peer, at, "cpu", lambda: None, 100)
    assert touched == [{"a"}, {"a"}]
    assert loaded["bytes"] == 8


@pytest.fixture
def slow_rounds():
    def measure(name, number):
        return row(1) | {"load": {measuring.MORE_THAN: 9.0}} if name == "dcp" else row(2, 2)

    found = measuring.Rounds(["ringstow", "dcp"])
    list(measuring.measure_rounds(found, 2, measure))
    return found


def test_peer_beyond_the_time_limit_is_stopped_others_continue(slow_rounds):
    assert [set(done) for done in slow_rounds.done] == [{"ringstow", "dcp"}, {"ringstow"}]
    assert slow_rounds.stopped == {"dcp": "load took more than 9 s"}
    assert slow_rounds.more_than("dcp", "load") == 9.0
    assert slow_rounds.more_than("dcp", "save") is slow_rounds.more_than("ringstow", "load") is None
    last = [*table.rows(slow_rounds)][-1]
    assert " ".join(last.split()) == "dcp STOPPED load took more than 9 s"
    assert table.ratios(slow_rounds, "save", "ringstow", ["dcp"]) == [0.5]
    assert table.ratios(slow_rounds, "load", "ringstow", ["dcp"]) == []


def test_peer_beyond_the_time_limit_is_skipped_with_more_tensors(slow_rounds):
    reason = "skipped: load took more than 9 s with 10 tensors"
    more = measuring.Rounds(["ringstow", "dcp"], stopped=counts.skipped({10: slow_rounds}))
    assert more.stopped == {"dcp": reason}
    list(measuring.measure_rounds(more, 1, lambda name, number: row(1, 1)))
    assert [set(done) for done in more.done] == [{"ringstow"}]
    found = {10: slow_rounds, 1000: more}
    lines = [" ".join(line.split()) for line in counts.table(found)]
    assert "dcp, load > 9 -" in lines
    assert lines[-2:] == [
        "dcp, 10 tensors: load took more than 9 s",
        f"dcp, 1,000 tensors: {reason}",
    ]
    assert counts.skipped(found) == {"dcp": reason}
    stopped = [one.stopped for one in found.values()]
    assert [told["stopped"] for told in counts.as_json(found)] == stopped


WITHOUT_FIO = {**os.environ, "PATH": "/nonexistent"}
WORKER = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
module = sys.argv[2]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


def compare(at, rounds, *peers):
    command = [str(TOOLS / "compare.py"), "--gb", "0.01", "--rounds", str(rounds)]
    command += ["--peers", *peers, "--nothing-installed"]
    return [*command, "--dir", str(at), "--out", str(at / "out")]


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs compare.py here, and its workers in forked processes.

    The run that is interrupted has workers of its own, in new interpreters.
    """

    def run_forked(command, log, seconds_max, environment=None, stdin=None):
        assert command[1:4] == ["-W", "ignore", "-m"]
        done = forked.python(WORKER, TOOLS, *command[4:], env=environment)
        return done.returncode, done.stdout + done.stderr

    def run(command):
        monkeypatch.setattr(sys, "argv", command)
        return compare_tool.main()

    monkeypatch.setattr(processes, "run_kept", run_forked)
    monkeypatch.setenv("PATH", WITHOUT_FIO["PATH"])
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_two_peers_are_compared_in_a_small_run(at, run):
    assert run(compare(at, 1, "torch.save", "safetensors")) == 0
    result = json.loads((at / "out" / "result.json").read_text())
    assert [set(measured) for measured in result["rounds"]] == [{"torch.save", "safetensors"}]
    assert result["failed"] == {}
    saved = result["rounds"][0]["torch.save"]["save"]
    assert saved["seconds"] >= saved["seconds_without_our_fsync"] > 0
    assert "torch.save" in (at / "out" / "table.txt").read_text()
    assert sorted(path.name for path in at.iterdir()) == ["out"]


# compare.py, whose workers of the first round are forked, and which is ended when a worker of the
# second runs, in a session of its own.
INTERRUPTED = """
import os, signal, subprocess, sys
import compare, forked
from comparing import measuring, processes

run_kept, measure_round = processes.run_kept, measuring.measure_round
forked_worker, round_number, started = sys.argv.pop(1), 0, []

class Interrupting(subprocess.Popen):
    def wait(self, timeout=None):
        if self not in started:
            started.append(self)
            print("worker", self.pid, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        return super().wait(timeout)

def run(command, log, seconds_max, environment=None, *rest):
    if round_number == 0:
        done = forked.python(forked_worker, sys.path[0], *command[4:], env=environment)
        return done.returncode, done.stdout + done.stderr
    subprocess.Popen = Interrupting
    return run_kept(command, log, seconds_max, environment, *rest)

def measure(rounds, number, *rest):
    global round_number
    round_number = number
    return measure_round(rounds, number, *rest)

processes.run_kept, measuring.measure_round = run, measure
sys.exit(compare.main())
"""


def test_interrupted_run_keeps_rounds_and_leaves_no_process(at):
    name, *words = compare(at, 1000, "torch.save")
    done = forked.python(INTERRUPTED, WORKER, *words, name=name, env=WITHOUT_FIO)
    assert done.returncode == 130, done.stderr
    [worker] = re.findall(r"worker (\d+)", done.stdout)
    assert not is_running(int(worker))
    kept = json.loads((at / "out" / "result.json").read_text())["rounds"]
    assert "1 of 1000 rounds were finished" in done.stdout
    assert [set(measured) for measured in kept] == [{"torch.save"}]
    assert sorted(path.name for path in at.iterdir()) == ["out"]


def test_cost_is_measured_for_each_number_of_tensors(at, run):
    assert run([*compare(at, 1, "torch.save"), "--tensors", "10", "20"]) == 0
    result = json.loads((at / "out" / "result.json").read_text())
    small, large = result["counts"]
    assert (small["tensors"], large["tensors"]) == (10, 20)
    assert len(large["seconds"]["torch.save"]["load"]) == 1
    measured = json.loads((at / "out" / "20-tensors" / "result.json").read_text())["rounds"]
    assert measured[0]["torch.save"]["save"]["bytes"] == 20 * 4096
    head, save, load = (at / "out" / "table.txt").read_text().splitlines()
    assert head.split()[-2:] == ["10", "20"]
    assert save.startswith("torch.save, save")
    assert load.startswith("torch.save, load")
    assert result["command"].startswith("python tools/compare.py --gb 0.01 ")
    assert {"date", "machine", "versions"} <= set(result)


def test_time_limit_ends_neither_the_run_nor_counts_as_a_failure(at, run):
    slow = ["--tensors", "20", "10", "--seconds", "0.000001"]
    assert run([*compare(at, 1, "torch.save"), *slow]) == 0
    small, large = json.loads((at / "out" / "result.json").read_text())["counts"]
    slow = "save took more than 1e-06 s"
    assert (small["tensors"], small["stopped"]) == (10, {"torch.save": slow})
    assert large["stopped"] == {"torch.save": f"skipped: {slow} with 10 tensors"}
    assert sorted(path.name for path in at.iterdir()) == ["out"]


def test_on_a_gpu_only_peers_that_load_onto_it_are_measured(at, run, capsys):
    command = [str(TOOLS / "compare.py"), "--device", "cuda:7", "--gb", "0.01"]
    assert run([*command, "--peers", "tensorizer", "--out", str(at)]) == 2
    assert "none of these peers loads onto cuda:7" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["mps", "cuda:", "cuda:x", "GPU"])
def test_other_devices_are_refused_by_name(name, run, capsys):
    with pytest.raises(SystemExit) as ended:
        run([str(TOOLS / "compare.py"), "--device", name])
    assert ended.value.code == 2
    assert f"{name!r} is none of cpu, cuda and cuda:N" in capsys.readouterr().err
