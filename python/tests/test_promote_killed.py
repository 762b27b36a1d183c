"""A promotion that is killed at any moment goes on where it was, and nothing of it stays behind.

``make torture-promotes`` is the long form. RINGSTOW_KILLS sets how many, RINGSTOW_SEED which.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import time

import pytest
import torch
from stores.faults import Hold
from stores.proxy import Proxy
from support import python_start

import ringstow

KILLS = int(os.environ.get("RINGSTOW_KILLS", "12"))
SEED = int(os.environ.get("RINGSTOW_SEED", "1"))
PART, UPLOADS = 5 << 20, 2
# Calls to the system that a promotion makes; one that is killed at a later call ends by itself.
CALLS = 60

PROGRAM = f"""
import sys, ringstow
print("begins", flush=True)
ringstow.promote(*sys.argv[1:], part_bytes={PART}, uploads={UPLOADS})
"""


@dataclasses.dataclass(frozen=True)
class Source:
    """What is promoted, and what a promotion that nobody kills does."""

    path: pathlib.Path
    state: dict
    files: dict
    """Bytes of each file, by its name in the store."""
    requests: int
    seconds: float


@pytest.fixture
def source(tmp_path, bucket):
    """Return two shards of three parts and a small one."""
    torch.manual_seed(SEED)
    state = {name: torch.randn(2_900_000) for name in ("a", "b")} | {"c": torch.randn(9)}
    config = ringstow.Config(shard_bytes=11_600_000)
    ringstow.save(state, tmp_path / "source" / "step-3", step=3, config=config)
    path = tmp_path / "source" / "step-3"
    with Proxy(bucket.server.url) as proxy:
        program = started(path, f"{bucket.url}/source/step-3", bucket, proxy)
        began = time.monotonic()
        assert program.wait() == 0, program.stderr.read()
        seconds = time.monotonic() - began
        requests = len(proxy.requests())
    manifest = json.loads(bucket.get("source/step-3/manifest.json"))
    files = {file["name"]: file["bytes"] for file in manifest["files"]}
    assert sorted(-(-size // PART) for size in files.values()) == [1, 3, 3]
    return Source(path, state, files, requests, seconds)


def started(path, url, bucket, proxy, **variables):
    """Start a promotion; return its process once it begins."""
    environment = {**os.environ, **bucket.environment(proxy.url), **variables}
    program = python_start(PROGRAM, path, url, env=environment)
    assert program.stdout.readline() == "begins\n", program.stderr.read()
    return program


@pytest.mark.timeout(36_000)
def test_killed_promotions_go_on_and_leave_nothing(tmp_path, bucket, source, seamed):
    dice = random.Random(SEED)
    at_requests = [(n, answer) for n in range(source.requests) for answer in (False, True)]
    orders = {
        kill_at_request: shuffled(at_requests, dice),
        kill_at_call: shuffled([(seamed, n) for n in range(1, CALLS + 1)], dice),
        kill_at_moment: ((dice.uniform(0, source.seconds),) for _ in itertools.count()),
    }
    kills, unknown, turns = collections.Counter(), 0, itertools.cycle(orders)
    for number in itertools.count():
        if kills.total() == KILLS:
            break
        assert number < 3 * KILLS + 9, "most promotions end before they are killed"
        kill = next(turns)
        where = next(orders[kill])
        trial = Trial(source, bucket, tmp_path / str(number))
        try:
            with Proxy(bucket.server.url) as proxy:
                kills[kill.__name__] += kill(trial, proxy, dice, *where)
                proxy.settle()
                trial.look(proxy)
            trial.end(dice)
        except BaseException as error:
            error.add_note(f"trial {number}, seed {SEED}: {kill.__name__} {where}")
            raise
        unknown += len(trial.unknown)
        trial.clear()
    print(f"{dict(kills)}; {unknown} uploads whose number no program had learned")
    print(f"promise: a killed promotion goes on where it was: {KILLS} kills, 0 broken")


def shuffled(every, dice):
    """Return all in a random order, again and again."""
    return itertools.cycle(dice.sample(every, len(every)))


def kill_at_request(trial, proxy, dice, skip, answer):
    """Kill at a request: before the server sees it or after its answer; a cut one never arrives."""
    held = proxy.on(Hold(answer=answer), skip=skip)
    program = trial.start(proxy)
    held.wait()
    killed = ended(program)
    held.release(cut=dice.random() < 0.5)
    return killed


def kill_at_moment(trial, proxy, dice, seconds):
    program = trial.start(proxy)
    time.sleep(seconds)
    return ended(program)


def kill_at_call(trial, proxy, dice, package, number):
    order = {"PYTHONPATH": str(package), "RINGSTOW_TEST_SEAM": f"kill:{number}"}
    program = trial.start(proxy, **order)
    program.wait()
    return ended(program)


def ended(program):
    """Kill a program; return whether that ended it, and not the program itself."""
    program.kill()
    said = program.communicate()[1]
    assert program.returncode in (0, -signal.SIGKILL, -signal.SIGABRT), said
    return program.returncode != 0


class Trial:
    """One promotion that is killed, in a directory and at a URL of its own."""

    def __init__(self, source, bucket, folder):
        self.source, self.bucket, self.run = source, bucket, folder / "run"
        self.prefix = f"{folder.name}/step-3"
        self.url = f"{bucket.url}/{self.prefix}"
        self.path = self.run / "step-3"
        shutil.copytree(source.path, self.path, copy_function=os.link)

    def start(self, proxy, **variables):
        return started(self.path, self.url, self.bucket, proxy, **variables)

    def look(self, proxy):
        """Check what a kill has left; note what there is to go on with."""
        begun, finished, self.noted = self.journal()
        self.unknown = self.uploads() - set(begun.values())
        # The kill came between an upload's end and its line. s3s-fs refuses to abort what is gone
        # (403); S3 does not.
        unfinished = {id for name, id in begun.items() if name not in finished}
        self.is_lost = not unfinished <= self.uploads()
        assert len(self.unknown) <= UPLOADS
        self.is_committed = self.bucket.has(f"{self.prefix}/manifest.json")
        if self.is_committed:
            return self.check_loads()
        with pytest.raises((ringstow.IncompleteCheckpointError, ringstow.NoCheckpointError)):
            ringstow.load(self.url)
        assert ringstow.latest(os.path.dirname(self.url)) is None
        answered = {part_of(one) for one in proxy.requests("PUT", "partNumber") if one.status}
        assert len(answered - self.noted) <= UPLOADS, "parts that were sent are not in the journal"

    def end(self, dice):
        """Go on with the promotion, or give it up."""
        if dice.random() < 0.75:
            self.go_on()
        else:
            self.give_up()
        assert self.uploads() == self.unknown

    def go_on(self):
        wanted = self.missing_bytes()
        with Proxy(self.bucket.server.url) as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            report = ringstow.promote(self.path, self.url, part_bytes=PART, uploads=UPLOADS)
            passed = sum(request.up for request in proxy.requests("PUT", "safetensors"))
        assert (report.sent_bytes, passed) == (wanted, wanted)
        self.check_loads()
        assert not ringstow.prune(self.run).left  # an empty directory may be left
        assert os.listdir(self.run) == ["step-3"]

    def give_up(self):
        """Remove the checkpoint: nobody can go on. `prune` ends that, `remove` empties the URL."""
        ringstow.remove(self.path)
        left = ringstow.prune(self.run).left
        if self.is_lost:
            assert "AccessDenied" in left[0].reason
        else:
            assert not left
            assert os.listdir(self.run) == []
        if self.is_committed:
            return self.check_loads()
        if self.keys():
            ringstow.remove(self.url)
        assert self.keys() == set()

    def check_loads(self):
        """Check that the whole checkpoint is at the URL, and nothing else."""
        loaded = ringstow.load(self.url)
        assert loaded.keys() == self.source.state.keys()
        assert all(torch.equal(loaded[name], one) for name, one in self.source.state.items())
        assert ringstow.verify(self.url).ok
        assert self.keys() == {*self.source.files, "manifest.json"}

    def missing_bytes(self):
        """Return the bytes that nobody has sent, as far as the journal knows."""
        there = self.keys()
        return sum(
            min(PART, size - part * PART)
            for name, size in self.source.files.items()
            if name not in there
            for part in range(-(-size // PART))
            if (name, part) not in self.noted
        )

    def journal(self):
        """Return the uploads that were begun by name, those that ended, and the parts sent."""
        lines = []
        for path in self.run.glob(".ringstow-promotions/*/journal.jsonl"):
            lines += [json.loads(line) for line in path.read_text().split("\n") if line]
        of = collections.defaultdict(list)
        for line in lines:
            of[line["what"]].append(line)
        begun = {line["name"]: line["upload"] for line in of["begun"]}
        finished = {line["name"] for line in of["finished"]}
        return begun, finished, {(line["name"], line["part"]) for line in of["sent"]}

    def keys(self):
        return {key.rpartition("/")[2] for key in self.bucket.keys(self.prefix)}

    def uploads(self):
        every = self.bucket.uploads().items()
        return {upload for upload, key in every if key.startswith(self.prefix)}

    def clear(self):
        if self.keys():
            ringstow.remove(self.url)
        for upload, key in self.bucket.uploads().items():
            self.bucket.request("DELETE", key, uploadId=upload)
        shutil.rmtree(self.run.parent)


def part_of(request):
    """Return the name and the number, from 0, of the part that a request sends."""
    return request.path.rpartition("/")[2], int(request.query["partNumber"]) - 1
