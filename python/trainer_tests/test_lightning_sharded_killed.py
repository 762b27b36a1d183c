"""A kill of one rank, or of all, at any moment leaves a sharded checkpoint that Lightning takes."""

from __future__ import annotations

import os
import signal

import children
import lightning_shards as shards
import pytest
from lightning_shards import EVERY
from support import assert_same

import ringstow

pytestmark = pytest.mark.timeout(300)  # four or more processes, each of them a whole run

# The kind; the moment; of which save, from 1; which ranks. The first save is awaited.
MOMENTS = [
    ("mp", "writing", 1, (0, 1)),
    ("mp", "writing", 3, (1,)),
    ("mp", "training", 3, (0, 1)),
    ("mp", "training", 3, (0,)),
    ("mp", "written", 3, (1,)),
    ("mp", "committing", 3, (0,)),
    ("mp", "committed", 3, (0,)),
    ("mp", "removing", 2, (0,)),
    ("mp", "naming", 1, (0,)),
    ("fsdp", "training", 3, (1,)),
    ("fsdp", "committing", 3, (0,)),
]


def killed(rank, ranks, kind, root, moment, number, victims):
    """Train, and be killed at a moment of one of the saves."""
    from lightning_processes import Batches, die

    from ringstow.dcp import _mark
    from ringstow.distributed import _commit, _save
    from ringstow.integrations._lightning import _paths, _ranks

    batches, count = Batches(), 0
    write = _save._Save._write_share

    def begin(*_):
        nonlocal count
        count += 1

    def at(*moments):
        def act(*_):
            if count == number and rank in victims and moment in moments:
                if moment == "training":
                    assert batches.has_begun.wait(300)
                die()

        return act

    def write_share(self, state):
        done = write(self, state)
        at("written")()
        return done

    # In training's thread: no batch begins meanwhile.
    children.before(_ranks.Ranks, "save_async", lambda *_: batches.has_begun.clear())
    children.before(_save._Save, "_meet", begin)
    _save._Save._write_share = write_share
    children.before(_save._Save, "_write_share", at("writing", "training"))
    children.before(_commit.Shared, "_commit", at("committing"))
    children.before(_mark, "write", at("committed"))
    children.before(_paths, "remove", at("removing"))
    children.before(_paths, "put", at("naming"))
    shards.run(kind, ranks, root, batches).fit(shards.model())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return what runs of each kind learn that are not killed."""
    at = tmp_path_factory.mktemp("unbroken")
    ends = {
        kind: children.results(2, shards.fit, f"stock-{kind}", at / kind)[0]
        for kind in ("mp", "fsdp")
    }
    assert [begun for begun, _ in ends.values()] == [0, 0]
    return {kind: learned for kind, (_, learned) in ends.items()}


@pytest.mark.parametrize(("kind", "moment", "number", "victims"), MOMENTS)
def test_a_killed_sharded_run_resumes_to_the_bit(kind, moment, number, victims, tmp_path, unbroken):
    root = tmp_path / "run"
    codes = children.exit_codes(2, killed, kind, root, moment, number, victims)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes  # the others do not take a lost save for a success
    is_committed = moment in ("committed", "removing")
    at_least = (number if is_committed else number - 1) * EVERY
    found = ringstow.latest(root) if os.path.isdir(root) else None
    if at_least:
        assert ringstow.verify(found).ok
        assert ringstow.load(found)["lightning"][0]["global_step"] >= at_least
    else:
        assert found is None or moment == "naming"
    checkpoint = None if found is None else "latest"
    begun, learned = children.results(2, shards.fit, kind, root, checkpoint)[0]
    assert begun >= at_least
    assert_same(learned, unbroken[kind])
    kept = [name for name in os.listdir(root) if not name.startswith(".")]
    newest = ringstow.latest(root)
    assert os.path.basename(newest) in kept
    assert ringstow.load(newest)["lightning"][0]["global_step"] == shards.STEPS
