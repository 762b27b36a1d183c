"""Policies of when to save ask at the steps and times that they name, alike on all ranks.

No process group and no real clock: `Team` here is several ranks in one process.
"""

import datetime
import itertools
import random
import signal

import pytest
from support import raising

import ringstow
from ringstow import (
    AtSteps,
    Before,
    CheckpointManager,
    Continuous,
    Every,
    EverySteps,
    First,
    InvalidStateError,
    OnSignal,
)
from ringstow._core import _when as policies
from ringstow._core._arguments import span
from ringstow._manager import _when
from ringstow._manager._when import Schedule, lag_of, last_save

S = 1_000_000
FOREVER = 1 << 60


class Clock:
    """Seconds that a test moves on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Ranks:
    """Several ranks in one process: all begin the same beats, and then hear them."""

    def __init__(self, size):
        self.size = size
        self.beats = []
        self.sides = [Side(self, rank) for rank in range(size)]


class Side:
    """One of them."""

    def __init__(self, ranks, rank):
        self._ranks, self._begun = ranks, 0
        self.size, self.is_first = ranks.size, rank == 0

    def each(self, work):
        return work()

    def do_nothing(self, *_):
        pass

    prepare_end = begin_end = finish_end = do_nothing

    def begin_max(self, values):
        number, self._begun = self._begun, self._begun + 1
        beats = self._ranks.beats
        if number == len(beats):
            beats.append([])
        beats[number].append(values)
        return lambda: [max(column) for column in zip(*beats[number], strict=True)]


class Handle:
    """A save in the background, which the test ends."""

    def __init__(self):
        self._callbacks = []
        self.total, self.written = 100, 0
        self.has_ended = False

    def add_done_callback(self, call):
        self._callbacks.append(call)

    def progress(self):
        return self

    def done(self):
        return self.has_ended

    def _is_committed(self):
        return True

    def ends(self):
        self.has_ended = True
        for call in self._callbacks:
            call(self)


def asked(when, steps):
    """Return the steps at which a policy of steps saves."""
    schedule = Schedule(when, Ranks(1).sides[0], "run", Clock())
    return [step for step in steps if schedule.asks(step)]


@pytest.mark.parametrize(
    ("when", "steps", "saved"),
    [
        (EverySteps(5), range(16), [5, 10, 15]),
        (EverySteps(5), range(10, 16), [10, 15]),
        (EverySteps(5), range(11, 16), [15]),
        (EverySteps(1), range(3), [1, 2]),
        (EverySteps(10), range(0, 60, 7), [14, 21, 35, 42, 56]),
        (EverySteps(10), range(0, 60, 25), [25, 50]),
        (EverySteps(5), [3, 4, 17, 18], [17]),
        (AtSteps([3, 100, 7]), range(10), [3, 7]),
        (AtSteps({0}), range(10), [0]),
        (AtSteps([3, 5]), [4, 8, 9], [8]),
        (AtSteps([3, 5]), [2, 8, 9], [8]),
        (First(), range(7, 10), [7]),
        (First() | EverySteps(3) | AtSteps([4]), range(8), [0, 3, 4, 6]),
    ],
    ids=str,
)
def test_steps_decide_without_a_clock(when, steps, saved):
    assert asked(when, steps) == saved


def test_a_step_that_is_asked_for_again_has_the_same_answer_and_an_earlier_one_is_refused():
    schedule = Schedule(EverySteps(5), Ranks(1).sides[0], "run")
    saves = [step for step in (4, 5, 5, 5, 6, 6) if schedule.asks(step)]
    assert saves == [5, 5, 5]
    with pytest.raises(InvalidStateError, match=r"should_save\(5\) comes after should_save\(6\)"):
        schedule.asks(5)
    schedule.restart()
    assert schedule.asks(5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("30s", 30), ("10min", 600), ("10m", 600), ("1h30min", 5400), ("1h 30 min", 5400)),
        *(("0.5s", 0.5), ("250ms", 0.25), ("2d", 172800)),
        (datetime.timedelta(minutes=2), 120),
    ],
    ids=str,
)
def test_times_are_read_with_their_units(text, seconds):
    assert span(text, "Every").total_seconds() == seconds


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Every(600), TypeError, "Every takes a time with its unit, such as '30s'.* not 6"),
        (lambda: Every("600"), InvalidStateError, "Every takes a time with its unit.* not '600'"),
        (lambda: Every(""), InvalidStateError, "Every takes a time"),
        (lambda: Every("10 parsecs"), InvalidStateError, "not '10 parsecs'"),
        (lambda: Every("0s"), InvalidStateError, "it must be more than zero"),
        (lambda: EverySteps(0), InvalidStateError, r"EverySteps\(0\): must be 1 or more"),
        (lambda: EverySteps("5"), TypeError, "EverySteps takes whole numbers of steps, not '5'"),
        (lambda: EverySteps(True), TypeError, "not True"),
        (lambda: AtSteps([]), InvalidStateError, "never saves"),
        (lambda: AtSteps(5), TypeError, "AtSteps takes a list of steps"),
        (lambda: AtSteps([-1]), InvalidStateError, "must be 0 or more"),
        (lambda: OnSignal("SIGTERM"), TypeError, r"such as OnSignal\(signal.SIGTERM\)"),
        (lambda: OnSignal(999), TypeError, "not 999"),
        (lambda: OnSignal(signal.SIGKILL), InvalidStateError, "no program can handle SIGKILL"),
        (lambda: OnSignal(grace=30), TypeError, "OnSignal.grace takes a time with its unit"),
        (lambda: Before("4h"), TypeError, "Before takes a datetime.datetime"),
        (lambda: Before(30), InvalidStateError, "a time before 2001"),
        (lambda: policies.checked(500), TypeError, r"such as ringstow.EverySteps\(500\)"),
        (lambda: policies.checked(First), TypeError, r"write First\(...\)"),
        (lambda: EverySteps(5) | 3, TypeError, "unsupported operand"),
    ],
)
def test_what_cannot_be_is_named(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_policies_are_values():
    one = EverySteps(5) | OnSignal(grace="30s")
    assert one == EverySteps(5) | OnSignal(signal.SIGTERM, grace="30s")
    assert len({one, EverySteps(5) | OnSignal(grace="30s"), EverySteps(5)}) == 2
    assert repr(EverySteps(5) | First()) == "EverySteps(steps=5) | First()"
    both = OnSignal(signal.SIGUSR1, signal.SIGTERM) | OnSignal(grace="30s")
    assert policies.graces(both) == {signal.SIGUSR1: None, signal.SIGTERM: 30}


@pytest.mark.parametrize(
    ("left", "save", "flight", "saves", "said"),
    [
        (FOREVER, 0, 0, True, "should_save asks for it"),
        (FOREVER, 9 * S, 9 * S, True, "should_save asks for it"),
        (30 * S, 60 * S, 60 * S, True, "a save takes an unknown time after the one in progress"),
        (30 * S, 5 * S, 0, True, "30.0 s are left, and a save takes 5.00 s"),
        (30 * S, 20 * S, 9 * S, True, "after the one in progress, which takes 9.00 s more"),
        (30 * S, 20 * S, 11 * S, False, "the save in progress is finished in its place"),
        (30 * S, 31 * S, 0, False, "The earlier checkpoint stays"),
        (10 * S, 20 * S, 11 * S, False, "may not be durable in time. The earlier checkpoint stays"),
        (30 * S, 0, 0, True, "a save takes an unknown time"),
        (30 * S, 0, 11 * S, True, "an unknown time after the one in progress, which takes 11.0 s"),
        (10 * S, 0, 11 * S, False, "may not be durable in time"),
        (-1 * S, 0, 0, False, "0.0 ms are left"),
    ],
)
def test_last_save_is_begun_only_if_it_will_be_durable_in_time(left, save, flight, saves, said):
    last = last_save(left, save, flight)
    assert last.saves == saves
    assert said in last.why


@pytest.mark.parametrize(
    ("step_us", "lag"),
    [(0, 1), (1, 32), (50_000, 20), (300_000, 3), (700_000, 1), (999_999, 1), (S, 0), (60 * S, 0)],
)
def test_beats_are_a_second_apart_and_long_steps_wait_for_them(step_us, lag):
    assert lag_of(step_us, S) == lag


class Training:
    """Ranks that ask after each step, with saves that take a time of the clock."""

    def __init__(self, when, ranks=1, step_s=0.05, save_s=0.0):
        self.clock = Clock()
        self.ranks = Ranks(ranks)
        self.all = [Schedule(when, side, "run", self.clock) for side in self.ranks.sides]
        self.step_s, self.save_s = step_s, save_s
        self.step = 0
        self.saved = []
        self.in_flight = []

    def steps(self, count, step_s=None):
        for _ in range(count):
            self.step += 1
            self.clock.now += self.step_s if step_s is None else step_s
            self.end_saves()
            # As ranks do: all begin a beat before one of them needs to hear it.
            answers = [one.asks(self.step) for one in self.all]
            assert len(set(answers)) == 1, f"step {self.step}: {answers}"
            assert len({one.stopping for one in self.all}) == 1
            if answers[0]:
                self.save()

    def save(self):
        self.saved.append((self.step, self.clock.now - 1000.0))
        handles = [Handle() for _ in self.all]
        for one, handle in zip(self.all, handles, strict=True):
            one.follow(handle)
        self.in_flight.append((self.clock.now + self.save_s, handles))

    def end_saves(self):
        for ends, handles in list(self.in_flight):
            if ends <= self.clock.now:
                self.in_flight.remove((ends, handles))
                for handle in handles:
                    handle.ends()

    def signal(self, rank=0):
        number = next(iter(self.all[rank]._notices._graces))
        self.all[rank]._notices.noted[number] = self.clock.now

    def close(self):
        for one in reversed(self.all):
            one.close()


@pytest.fixture
def training():
    made = []

    def make(*args, **kwargs):
        made.append(Training(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("step_s", [0.007, 0.05, 0.3])
def test_every_second_saves_within_one_step_of_its_time(training, ranks, step_s):
    one = training(Every("1s"), ranks=ranks, step_s=step_s)
    one.steps(round(60 / step_s))
    times = [at for _, at in one.saved]
    assert len(times) in (59, 60)
    for second, at in enumerate(times, start=1):
        assert abs(at - second) <= step_s + 0.001, (second, at)


@pytest.mark.parametrize("ranks", [1, 3])
def test_time_counts_from_the_last_save_whichever_policy_asked(training, ranks):
    one = training(Every("10s") | AtSteps([100]), ranks=ranks, step_s=0.1)
    one.steps(310)
    steps = [step for step, _ in one.saved]
    assert steps[:1] == [100] or steps[:2] == [100, 101]
    assert len([step for step in steps if step > 101]) == 2


@pytest.mark.parametrize("ranks", [1, 4])
def test_continuous_saves_again_once_the_last_is_durable(training, ranks):
    one = training(Continuous(), ranks=ranks, step_s=0.3, save_s=1.0)
    one.steps(100)
    begun = [at for _, at in one.saved]
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    assert min(gaps) >= 1.0
    lag_s = 0.0 if ranks == 1 else 2 * 3 * 0.3
    assert max(gaps) <= 1.0 + 0.3 + lag_s


@pytest.mark.parametrize("rank", range(4))
def test_a_signal_to_one_rank_stops_all_at_the_same_saved_step(training, rank):
    one = training(EverySteps(1000) | OnSignal(), ranks=4, step_s=0.05)
    one.steps(100)
    one.signal(rank)
    for steps in (40, 100):  # the training should have ended; only steps still count
        one.steps(steps)
        assert (len(one.saved), one.all[0].stopping) == (1, True)


def test_a_process_alone_stops_at_once(training):
    one = training(EverySteps(1000) | OnSignal(grace="30s"))
    one.steps(3)
    one.signal()
    one.steps(1)
    assert (one.saved[0][0], one.all[0].stopping) == (4, True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_that_only_another_handler_handles_stops_all_without_a_limit(training, ranks):
    one = training(EverySteps(1000) | OnSignal(signal.SIGUSR1, grace="1ms"), ranks=ranks)
    one.steps(3)
    one.all[-1].note(signal.SIGTERM)
    one.steps(60)
    assert (len(one.saved), one.all[0].stopping) == (1, True)
    assert one.all[0].signal == signal.SIGTERM


@pytest.mark.parametrize("seed", range(20))
def test_ranks_answer_alike_whatever_each_of_them_sees(training, seed):
    """Clocks of steps vary, saves end at any time, and the signal may come at any moment."""
    dice = random.Random(seed)
    when = dice.choice([Every("700ms") | EverySteps(37), Continuous(), Every("3s") | Continuous()])
    one = training(when | OnSignal(grace="20s"), ranks=3, save_s=dice.choice([0.2, 1.5, 30.0]))
    for _ in range(dice.randrange(5, 400)):
        one.steps(1, step_s=dice.choice([0.001, 0.05, 0.05, 0.6, 0.9]))
    one.signal(dice.randrange(3))
    for _ in range(80):
        one.steps(1, step_s=dice.choice([0.001, 0.05, 0.3]))
    assert one.all[0].stopping


@pytest.mark.parametrize("ranks", [1, 2])
def test_grace_too_short_by_half_keeps_the_earlier_checkpoint_and_says_so(training, caplog, ranks):
    one = training(EverySteps(20) | OnSignal(grace="10s"), ranks=ranks, step_s=0.5, save_s=20.0)
    one.steps(20 + 45)  # the save of step 60 has just begun
    saved = len(one.saved)
    one.signal()
    one.steps(6)
    assert one.all[0].stopping
    assert len(one.saved) == saved
    (record,) = [r for r in caplog.records if "ends the training" in r.getMessage()]
    assert "The earlier checkpoint stays" in record.getMessage()


def test_a_save_in_progress_is_finished_if_another_would_not_be_durable_in_time(training, caplog):
    one = training(EverySteps(100) | OnSignal(grace="20s"), ranks=2, step_s=0.5, save_s=15.0)
    one.steps(203)
    saved = len(one.saved)
    one.signal(1)
    one.steps(8)
    assert one.all[0].stopping
    assert len(one.saved) == saved
    assert "the save in progress is finished in its place" in caplog.text


@pytest.mark.parametrize(("grace", "saves"), [("1h", True), ("20s", False)])
def test_during_the_first_save_another_begins_only_if_there_is_much_time(training, grace, saves):
    one = training(First() | OnSignal(grace=grace), ranks=2, step_s=0.5, save_s=30.0)
    one.steps(4)
    one.signal()
    one.steps(8)
    assert one.all[0].stopping
    assert len(one.saved) == 1 + saves


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_save_before_a_deadline_is_durable_in_time(training, monkeypatch, ranks):
    monkeypatch.setattr(_when.time, "time", lambda: 5e9)
    one = training(EverySteps(100) | Before(5e9 + 300), ranks=ranks, step_s=0.5, save_s=10.0)
    one.steps(600)
    assert one.all[0].stopping
    stopped = [at for step, at in one.saved if step % 100]
    assert len(stopped) == 1, one.saved
    assert 300 - 30 <= stopped[0] <= 300 - 10, "10 s are left, and not many more"


def test_the_handlers_are_restored_even_if_another_rank_has_ended(monkeypatch):
    side = Ranks(2).sides[0]
    gone = raising(RuntimeError("Connection closed by peer"))
    monkeypatch.setattr(side, "begin_max", lambda values: gone)
    before = signal.getsignal(signal.SIGTERM)
    one = Schedule(OnSignal(), side, "run")
    one.asks(1)
    with pytest.raises(RuntimeError, match="closed by peer"):
        one.close(settles=True)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_that_ask_for_different_steps_are_told(training):
    one = training(EverySteps(5) | OnSignal(), ranks=2)
    one.steps(2)

    def ask_apart():
        for step in range(3, 50):
            one.all[1].asks(step + 1)
            one.all[0].asks(step)

    with pytest.raises(InvalidStateError, match="for different steps: 3 and 4"):
        ask_apart()


@pytest.mark.parametrize("when", [EverySteps(5), OnSignal()], ids=str)
@pytest.mark.parametrize("step", [None, True, 1.5])
def test_a_step_that_is_no_number_is_refused_at_once(training, when, step):
    with pytest.raises(TypeError, match="step is an? (integer|number), not"):
        training(when).all[0].asks(step)


def test_most_steps_do_not_communicate(training):
    for when, least in [(EverySteps(5) | AtSteps([7]), 0), (EverySteps(5) | OnSignal(), 40)]:
        one = training(when, ranks=2, step_s=0.05)
        one.steps(1000)
        assert len(one.ranks.beats) <= least + 20
        assert len(one.ranks.beats) >= least


def test_without_a_policy_there_is_nothing_to_ask(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        assert not manager.stopping
        with pytest.raises(InvalidStateError, match=r"when=ringstow.EverySteps\(500\)"):
            manager.should_save(1)
    with pytest.raises(TypeError, match="when must be a policy"):
        CheckpointManager(tmp_path / "run", when=500)
    assert issubclass(First, ringstow.When)
