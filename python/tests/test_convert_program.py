"""The program `ringstow convert`: its output, progress and memory."""

import contextlib
import os
import signal

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import Evil, read_hf, saved, trained
from safetensors.torch import save_file
from support import python, raising

import ringstow
from ringstow import convert as conversions
from ringstow._publish import _replace
from ringstow.convert import _cli, _targets, torch_to_ringstow


@pytest.fixture(autouse=True)
def warnings_as_before():
    """Undo how the program, which has a process of its own, shows warnings."""
    before = _cli.warnings.showwarning
    yield
    _cli.warnings.showwarning = before


def test_progress_reaches_the_total_of_both_phases(at):
    said = {}
    saved({"a": torch.ones(1000), "b": torch.ones(5)}, at / "a.pt")
    torch_to_ringstow(at / "a.pt", at / "ckpt", progress=lambda p, d, t: said.update({p: (d, t)}))
    assert said["verifying"] == (4020, 4020)
    assert said["writing"][0] == said["writing"][1] > 4020


BOUNDED = """
import sys, threading
import torch
from ringstow import Config, convert

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) * 1024 for l in status if l.startswith("RssAnon"))

small, big, target, to = sys.argv[1:]
config = Config(pool_bytes=16 << 20, block_bytes=1 << 20)
convert.convert(small, to + ".small", target=target, config=config)  # imports, pools
before, peak, end = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not end.wait(0.002):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
report = convert.convert(big, to, target=target, config=config)
end.set()
thread.join()
print(report.tensor_bytes, peak - before)
"""


def save_hf(state, path):
    os.mkdir(path)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


WRITERS = {
    "torch": torch.save,
    "dcp": lambda state, path: dcp.save(state, checkpoint_id=path, no_dist=True),
    "ringstow": ringstow.save,
    "hf": save_hf,
}
OTHERS = ("torch", "dcp", "hf")


@pytest.mark.parametrize(
    ("source", "target"),
    [*((kind, "ringstow") for kind in OTHERS), *(("ringstow", kind) for kind in OTHERS)],
)
def test_memory_stays_at_a_few_tensors(at, source, target):
    for name, count in (("small", 2), ("big", 200)):
        state = {f"w{i}": torch.randn(256, 1024) for i in range(count)}
        WRITERS[source](state, at / name)
    ran = forked.python(BOUNDED, at / "small", at / "big", target, at / "to", check=True)
    total, growth = map(int, ran.stdout.split())
    assert total == 200 << 20
    # About 20 MB are usual; the allocator's cache per thread varies from run to run.
    assert growth < total / 2


# The program


def program(*args, **options):
    return forked.ringstow("convert", *args, **options)


def test_program_converts_and_prints_a_summary(at):
    saved(trained(), at / "a.pt")
    assert "verified bit by bit" in program(at / "a.pt", at / "ckpt", check=True).stdout
    words = ["--to", "hf", "--prefix", "model.", "--dtype", "float16"]
    program(at / "ckpt", at / "hf", *words, check=True)
    assert read_hf(at / "hf")["0.weight"].dtype == torch.float16
    ran = program(at / "ckpt", at / "quiet.pt", "--quiet")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_program_renames(at, capsys):
    saved({"a.w": torch.ones(3), "b": {"w": torch.zeros(2)}}, at / "a.pt")
    words = [str(at / "a.pt"), str(at / "ckpt"), "--rename", "a=x.y", "--rename", "b="]
    assert _cli.main(words) == 0
    assert sorted(ringstow.open(at / "ckpt").keys()) == ["w", "x.y.w"]
    with pytest.raises(SystemExit):
        _cli.main([*words, "--rename", "a"])
    assert "'a' is not OLD=NEW" in capsys.readouterr().err


def test_program_prints_errors_in_one_line_and_does_not_call_them_damage(at):
    for source, word in ((at / "nothing", "nothing"), ("", "empty")):
        ran = program(source, at / "x")
        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
        assert word in ran.stderr
    saved({"evil": Evil(at / "mark")}, at / "a.pt")
    ran = program(at / "a.pt", at / "x")
    assert ran.returncode == 2
    assert "--allow-pickle" in ran.stderr
    assert not (at / "mark").exists()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 2, "MemoryError"),
        (RuntimeError("two\nlines"), 2, "RuntimeError: two lines"),
        (type("Damaged", (ringstow.CorruptCheckpointError,), {})("a hole"), 1, "a hole"),
    ],
)
def test_exit_code_is_that_of_the_error(monkeypatch, capsys, error, code, words):
    monkeypatch.setattr(_cli, "convert", raising(error))
    assert _cli.main(["--quiet", "a", "b"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("phase", ["writing", "verifying"])
def test_interrupted_program_says_what_is_left(at, monkeypatch, capsys, phase):
    saved({"a": torch.ones(3)}, at / "a.pt")
    if phase == "writing":
        monkeypatch.setitem(_targets.WRITERS, "ringstow", raising(KeyboardInterrupt))
    else:
        monkeypatch.setattr(conversions.Comparison, "check", raising(KeyboardInterrupt))
    assert _cli.main(["--quiet", str(at / "a.pt"), str(at / "ckpt")]) == 130
    said, is_there = capsys.readouterr().err, phase == "verifying"
    assert ("complete, but not verified" in said) == (at / "ckpt").exists() == is_there
    assert ("files are removed" in said) != is_there


def test_interrupt_after_the_swap_says_that_the_new_one_is_complete(at, monkeypatch, capsys):
    """Regression: it said that unfinished files are removed."""
    old, new = saved({"a": torch.zeros(3)}, at / "old.pt"), saved({"a": torch.ones(3)}, at / "a.pt")
    conversions.convert(old, at / "to", target="dcp")
    monkeypatch.setattr(_replace, "_clear_replaced", raising(KeyboardInterrupt))
    options = ["--quiet", "--overwrite", "--to", "dcp"]
    assert _cli.main([*options, str(new), str(at / "to")]) == 130
    assert f"{at / 'to'} is written and complete, but not verified" in capsys.readouterr().err
    conversions.convert(at / "to", at / "back")
    assert ringstow.load(at / "back")["a"].tolist() == [1, 1, 1]


COMMITS = {
    "ringstow": (conversions._targets._jobs, "run"),
    "hf": (conversions._targets._jobs, "run"),
    "dcp": (_targets.WRITERS, "dcp"),
    "torch": (_replace._native, "rename_new"),
    "dcp over": (_replace._native, "swap_names"),
    "hf over": (_replace._native, "swap_names"),
    "torch over": (_replace.os, "rename"),
}
"""What commits a target of each kind, and over one that exists."""


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("how", COMMITS)
def test_ctrl_c_at_the_commit_says_what_is_complete(at, monkeypatch, capsys, how, is_after):
    """Regression: it said that unfinished files are removed, although the target was complete."""
    kind, _, over = how.partition(" ")
    ringstow.save({"a": torch.ones(3)}, at / "new")
    options = ["--quiet", "--to", kind]
    if over:
        ringstow.save({"a": torch.zeros(3)}, at / "old")
        conversions.convert(at / "old", at / "to", target=kind)
        options.append("--overwrite")
    holder, name = COMMITS[how]
    is_dict = isinstance(holder, dict)
    commit = holder[name] if is_dict else getattr(holder, name)

    def interrupted(*args, **kwargs):
        monkeypatch.undo()
        done = commit(*args, **kwargs) if is_after else None
        os.kill(os.getpid(), signal.SIGINT)
        return done

    (monkeypatch.setitem if is_dict else monkeypatch.setattr)(holder, name, interrupted)
    assert _cli.main([*options, str(at / "new"), str(at / "to")]) == 130
    said = capsys.readouterr().err
    assert (f"{at / 'to'} is written and complete, but not verified" in said) == is_after, said
    assert ("unfinished files are removed" in said) != is_after, said
    if is_after or over:
        conversions.convert(at / "to", at / "back", source=kind, target="ringstow")
        assert ringstow.load(at / "back")["a"].tolist() == [float(is_after)] * 3
    else:
        assert sorted(os.listdir(at)) == ["new"]


def test_ctrl_c_dropped_at_the_end_says_that_the_target_is_complete(at, monkeypatch, capsys):
    saved({"a": torch.ones(3)}, at / "a.pt")
    convert = _cli.convert

    def dropping(*args, **kwargs):
        report = convert(*args, **kwargs)
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return report

    monkeypatch.setattr(_cli, "convert", dropping)
    before = signal.getsignal(signal.SIGINT)
    assert _cli.main([str(at / "a.pt"), str(at / "to")]) == 130
    told = capsys.readouterr()
    assert f"interrupted; {at / 'to'} is written and complete, and verified" in told.err
    assert told.out == ""
    assert signal.getsignal(signal.SIGINT) is before


EXITING = """
import atexit, os, signal, sys
from ringstow._program import _cli
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
_cli.main()
"""


def test_ctrl_c_after_the_success_line_does_not_change_the_result(at):
    """Regression: the program said that it had converted, and then ended by SIGINT."""
    ringstow.save({"a": torch.ones(3)}, at / "ckpt")
    ran = python(EXITING, "convert", at / "ckpt", at / "to.pt")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "verified bit by bit" in ran.stdout


TWICE = """
import os, signal, sys
from ringstow._program import _cli
from ringstow._publish import _replace
from ringstow.convert import _torch_files

unlink = _replace.os.unlink

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

def interrupted_again(path):
    interrupt()
    unlink(path)

_torch_files._Sink.write = interrupt
_replace.os.unlink = interrupted_again
_cli.main()
"""


def test_second_ctrl_c_ends_the_program_at_once_and_the_next_conversion_clears_up(at):
    ringstow.save({"a": torch.ones(3)}, at / "ckpt")
    ran = python(TWICE, "convert", at / "ckpt", at / "to.pt")
    assert ran.returncode == -signal.SIGINT, ran.stderr
    assert sorted(os.listdir(at)) == ["ckpt", "to.pt.part"]
    conversions.convert(at / "ckpt", at / "to.pt")
    assert sorted(os.listdir(at)) == ["ckpt", "to.pt"]


INTERRUPTED_WRITE = """
import os, signal, sys
from ringstow._program import _cli
from ringstow.convert import _torch_files

write, n = _torch_files._Sink.write, int(sys.argv.pop(1))

def interrupted(self, data):
    global n
    n -= 1
    if n == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return write(self, data)

_torch_files._Sink.write = interrupted
_cli.main()
"""


INTERRUPTED_IMPORT = """
import os, signal, sys
from ringstow._program import _cli

sys.argv.pop(1)

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
_cli.main()
"""


@pytest.mark.parametrize("call", [0, 1, 2, 5])
def test_ctrl_c_while_torch_is_imported_or_writes_ends_the_program_as_any_other(at, call):
    ringstow.save({f"w{i}": torch.randn(500) for i in range(9)}, at / "ckpt")
    code = INTERRUPTED_WRITE if call else INTERRUPTED_IMPORT
    ran = python(code, call, "convert", "--quiet", at / "ckpt", at / "to.pt")
    assert ran.returncode == -signal.SIGINT, ran.stderr
    assert ran.stderr == "ringstow: interrupted; unfinished files are removed\n"
    assert os.listdir(at) == ["ckpt"]


@pytest.mark.parametrize("hides", [RuntimeError, ImportError, None])
def test_ctrl_c_that_a_library_drops_or_turns_into_another_error_counts(monkeypatch, capsys, hides):
    def convert(*_, progress, **__):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if hides:
                raise hides("something else") from None
        progress("writing", 0, 1)

    monkeypatch.setattr(_cli, "convert", convert)
    before = signal.getsignal(signal.SIGINT)
    assert _cli.main(["--quiet", "a", "b"]) == 130
    assert capsys.readouterr().err.startswith("ringstow: interrupted")
    assert signal.getsignal(signal.SIGINT) is before


def test_bar_shows_one_phase_and_ends_full():
    bars = []

    class Bar:
        def __init__(self, desc, total, **options):
            self.desc, self.total, self.n, self.closed = desc, total, 0, False
            bars.append(self)

        def update(self, count):
            self.n += count

        def close(self):
            self.closed = True

    with _cli._Bar(Bar) as progress:
        for step in [("writing", 0, 0), ("writing", 5, 9), ("writing", 9, 9), ("verifying", 7, 7)]:
            progress(*step)
    assert [(b.desc, b.n, b.total, b.closed) for b in bars] == [
        ("writing", 9, 9, True),
        ("verifying", 7, 7, True),
    ]


@pytest.mark.parametrize(("value", "is_shown"), [("off", False), ("0", False), ("on", True)])
def test_environment_turns_the_lines_of_progress_off(at, monkeypatch, capsys, value, is_shown):
    """Regression: lines were printed even so, on a slow machine only."""
    monkeypatch.setenv("RINGSTOW_PROGRESS", value)
    monkeypatch.setattr(_cli, "_SLICE_S", 0.0)
    ringstow.save({"a": torch.ones(3)}, at / "ckpt")
    assert _cli.main([str(at / "ckpt"), str(at / "to.pt")]) == 0
    told = capsys.readouterr()
    assert "verified bit by bit" in told.out
    assert ("verifying: 12 B of 12 B\n" in told.err) == is_shown
    assert bool(told.err) == is_shown
