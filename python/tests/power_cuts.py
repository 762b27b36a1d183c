"""Cut a file system's power during Python operations, for ``test_power_cut.py``.

``python power_cuts.py CUT_DISK ext4|xfs|btrfs CUTS SEED OUTSIDE``. Each operation runs in a forked
child, which has torch imported already and keeps no file open.
"""

import ctypes
import dataclasses
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

from operations import OPERATIONS, left_over, look, must, start

DISKS = ["ext4", "xfs", "btrfs"]
# Operations that run when the power goes.
AT_ONCE = 4
# After so many cuts, some operations had ended and some had not.
ENOUGH = 9
# Different states: sources to convert from are kept.
STEPS = 32


class Disk:
    """A file system on a disk whose power can be cut."""

    def __init__(self, program, kind, seed):
        command = [program, kind, str(seed)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)
        answer = self._answer()
        if not answer or answer.startswith("error:"):
            sys.exit(f"no rig: {answer}")
        self.path = pathlib.Path(answer)

    def _answer(self):
        return self._process.stdout.readline().strip()

    def tell(self, word):
        """Cut or restore the power. A disk that can't be mounted afterwards is a broken promise."""
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer == "done", f"after {word}: {answer}"

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def sync(folder):
    """Makes what is in a folder durable. Other file systems may hang: they are left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def number(step):
    """Return the number of a step's state, never that of zeros."""
    return step % STEPS + 1


@dataclasses.dataclass
class Row:
    """The checkpoints of one operation, in a folder of its own."""

    name: str
    folder: pathlib.Path
    outside: pathlib.Path
    step: int = 0
    """The last step that was saved at `folder/c`."""
    usual: float = 0.0
    """Seconds that the operation takes."""

    def write(self, step, path):
        OPERATIONS[self.name](number(step), path, self.outside, lambda: None)

    def prepare(self):
        """Have an earlier checkpoint, and sources of later ones; print how long one takes."""
        for step in (1, 2):
            began = time.monotonic()
            self.write(step, self.folder / "c")
        print(time.monotonic() - began)

    def recover(self, path, allowed, step):
        """Check what the cut has left; write a step, print how long that took, and check it."""
        look(path, self.outside, [None if one is None else number(one) for one in allowed])
        began = time.monotonic()
        self.write(step, path)
        took = time.monotonic() - began
        look(path, self.outside, [number(step)])
        left = left_over(path)
        if path.name != "c":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert not left, f"{left} is left"
        print(took)


def prepare(rows):
    """Prepare the rows that are not: at the same time, as they run later."""
    new = [row for row in rows if not row.step]
    for row in new:
        row.folder.mkdir()
        row.outside.mkdir()
        sync(row.folder.parent)
    for row, wait in [(row, start(row.prepare)) for row in new]:
        row.step, row.usual = 2, float(must(wait(), row.name).split()[-1])


def cut_and_check(disk, outside, kind, cuts, seed):
    chance = random.Random(seed)
    rows = [Row(name, disk.path / name, outside / name) for name in OPERATIONS]
    chance.shuffle(rows)
    within = 0
    # A few cuts do not come to each operation: the next file system goes on where this one ends.
    begin = DISKS.index(kind) * cuts
    for cut in range(begin, begin + cuts):
        running, its_rows = [], [rows[(cut * AT_ONCE + i) % len(rows)] for i in range(AT_ONCE)]
        prepare(its_rows)
        for row in its_rows:
            fresh = chance.random() < 0.3
            running.append((row, row.folder / f"fresh-{cut}" if fresh else row.folder / "c"))
        waits = [start(row.write, row.step + 1, path) for row, path in running]
        # The random moment of the cut.
        time.sleep(chance.random() * 0.8 * max(row.usual for row, _ in running))
        disk.tell("cut")
        outcomes = [wait() for wait in waits]
        disk.tell("restore")
        checks = []
        for (row, path), (code, said) in zip(running, outcomes, strict=True):
            before = row.step if path.name == "c" else None
            # The operation may have ended just before the cut.
            allowed = [row.step + 1] if code == 0 else [before, row.step + 1]
            within += code != 0
            what = f"cut {cut} of seed {seed} in {row.name} to {path}, ended with {code}: {said}"
            checks.append((what, start(row.recover, path, allowed, row.step + 2)))
        for (row, path), (what, wait) in zip(running, checks, strict=True):
            row.usual = float(must(wait(), f"{what}\nthen").split()[-1])
            row.step += 2 if path.name == "c" else 0
    total = cuts * AT_ONCE
    assert cuts < ENOUGH or 0 < within < total, f"{within} of {total} were cut: it tests little"
    print(f"seed {seed}: {within} of {total} operations had not ended when the power went")


def leave_the_mounts_of_others():
    """Get a mount namespace, as ``unshare --mount`` does."""
    new_namespace = 0x20000  # CLONE_NEWNS
    if ctypes.CDLL(None).unshare(new_namespace):
        sys.exit("no rig: unshare of mounts is refused")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def main():
    program, kind, cuts, seed, outside = sys.argv[1:]
    leave_the_mounts_of_others()
    disk = Disk(program, kind, seed)
    try:
        cut_and_check(disk, pathlib.Path(outside), kind, int(cuts), int(seed))
        print(
            "promise: a power cut in Python saves and conversions leaves the old or the new: "
            f"{cuts} cuts of {kind}, each in {AT_ONCE} operations, 0 broken"
        )
    finally:
        disk.close()


if __name__ == "__main__":
    main()
