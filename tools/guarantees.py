"""Try what libraries do with a flipped bit, and with a kill while they save over a checkpoint.

    python tools/guarantees.py --peers ringstow torch.save dcp safetensors orbax

Each save and load is the one that tools/compare.py measures, in a process of its own, without the
syncs that compare.py adds. A kill (SIGKILL) comes at 5, 10, 20, 40 and 80 % of a save's time, and
the path then has the earlier state, the new one, or nothing that loads. The bit is flipped in a
tensor of the largest file, at rest. A peer that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from comparing.peer import State
from comparing.peers import PEERS

FRACTIONS = (0.05, 0.1, 0.2, 0.4, 0.8)
TENSORS = 16
EARLIER, NEWER = 1.0, 2.0
READY = "one save took "


def main() -> None:
    """Print a row for each peer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="+", choices=PEERS, required=True)
    parser.add_argument("--mb", type=int, default=400, help="size of the state")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments.peers[0], arguments.mb, *arguments.child)
        return
    for peer in arguments.peers:
        with tempfile.TemporaryDirectory(dir=".") as at:
            print(f"{peer:12}", _row(peer, arguments.mb, Path(at)), flush=True)


def _row(peer: str, mb: int, at: Path) -> str:
    def run(verb: str, name: str, value: float) -> subprocess.CompletedProcess[str]:
        command = _command(peer, mb, verb, at / name, value)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("save", "flip", EARLIER)
    if done.returncode:
        return "cannot save here: " + done.stderr.strip().rpartition("\n")[2]
    pickled = any(map(_is_pickle, (at / "flip").rglob("*")))
    _flip(max((at / "flip").rglob("*"), key=lambda path: path.stat().st_size))
    flipped = {0: "not seen, loads as it was", 3: "loaded"}.get(
        run("load", "flip", EARLIER).returncode, "refused"
    )
    told = f"flipped bit: {flipped}; pickle on the disk: {pickled}; after kills: "
    if run("save", "flip", NEWER).returncode:
        return told + "refuses to save over a checkpoint"
    left: Counter[str] = Counter()
    for fraction in FRACTIONS:
        name = f"kill-{fraction}"
        if run("save", name, EARLIER).returncode:
            return "cannot save again"
        _kill(_command(peer, mb, "save", at / name, NEWER), fraction)
        if run("load", name, EARLIER).returncode == 0:
            left["earlier"] += 1
        else:
            left["new" if run("load", name, NEWER).returncode == 0 else "nothing that loads"] += 1
    return told + ", ".join(f"{what} {count}" for what, count in sorted(left.items()))


def _command(peer: str, mb: int, verb: str, path: Path, value: float) -> list[str]:
    child = ["--child", verb, str(path.absolute()), str(value)]
    return [sys.executable, __file__, "--peers", peer, "--mb", str(mb), *child]


def _kill(command: list[str], fraction: float) -> None:
    """Kill a child in its save, which says how long one took it before it begins."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    # Libraries print lines of their own.
    said = (line for line in child.stdout if line.startswith(READY))
    time.sleep(float(next(said, "0").removeprefix(READY)) * fraction)
    child.send_signal(signal.SIGKILL)
    child.wait()


def _child(name: str, mb: int, verb: str, where: str, value: str) -> None:
    """Save, after one elsewhere that tells how long it takes; or load, and compare."""
    import torch

    peer, path = PEERS[name], Path(where)
    elements = mb * 1_000_000 // 4 // TENSORS
    state: State = {str(one): torch.full((elements,), float(value)) for one in range(TENSORS)}
    if verb == "save":
        assert peer.begin is not None
        _let_saves_repeat()
        peer.prepare()
        with tempfile.TemporaryDirectory(dir=path.parent) as other:
            start = time.monotonic()
            peer.begin(state, Path(other) / "warm")()
            print(f"{READY}{time.monotonic() - start}", flush=True)
        peer.begin(state, path)()
        return
    assert peer.load is not None
    like = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    loaded = peer.load(path, like, "cpu")
    sys.exit(0 if all(torch.equal(loaded[key], tensor) for key, tensor in state.items()) else 3)


def _let_saves_repeat() -> None:
    """Let the peers' `begin` write to a directory that exists."""
    made = Path.mkdir

    def mkdir(path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = True) -> None:
        made(path, mode, parents, True)

    Path.mkdir = mkdir  # type: ignore[method-assign,assignment]


def _flip(file: Path) -> None:
    with file.open("r+b") as opened:
        # Tensors of equal size begin at sixteenths, nearly.
        within = opened.seek(file.stat().st_size * 11 // 32)
        byte = opened.read(1)[0]
        opened.seek(within)
        opened.write(bytes([byte ^ 1]))


def _is_pickle(file: Path) -> bool:
    if not file.is_file():
        return False
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    with file.open("rb") as opened:
        return opened.read(1) == b"\x80"


if __name__ == "__main__":
    main()
