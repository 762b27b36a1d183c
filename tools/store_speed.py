"""Measures an object store's uploads and downloads: ringstow beside other clients.

    python tools/store_speed.py                        # 1 GB, 5 rounds
    python tools/store_speed.py --gb 4 --rounds 9 --json out.json
    python tools/store_speed.py --drop                 # to a server that takes little

The server is s3s-fs on this machine (`make stores`), in memory, and shares its cores with the
client: all clients have the same server in the same round, in changing order. ringstow
also compares every byte with its checksum. `load` puts the bytes into new tensors, `load_into` into
given ones, and the other clients into files in memory. DCP saves tensors in memory. With ``--drop``
the server checks nothing and drops what it gets, and there are no downloads.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ringstow
from comparing import speed, stores
from comparing.directories import fresh_directory, machine
from comparing.speed import Copied, cpu_seconds, ranked

_MEMORY = Path("/dev/shm")

Way = stores.Copy


def promote(folder: Path, prefix: str) -> None:
    ringstow.promote(folder, f"s3://{stores.BUCKET}/{prefix}")


def load(_: Path, prefix: str) -> None:
    ringstow.load(f"s3://{stores.BUCKET}/{prefix}")


def load_into(gb: float) -> Way:
    """Return the load into tensors that have their memory, as in a running training."""
    state = speed.state_of(gb)

    def load(_: Path, prefix: str) -> None:
        ringstow.load_into(state, f"s3://{stores.BUCKET}/{prefix}")

    return load


def known(ways: dict[str, Way | None]) -> dict[str, Way]:
    return {name: way for name, way in ways.items() if way is not None}


def timed(way: Way, folder: Path, prefix: str, nbytes: int) -> Copied:
    cpu, began = cpu_seconds(), time.perf_counter()
    by_itself = way(folder, prefix)
    seconds, cpu = by_itself or (time.perf_counter() - began, cpu_seconds() - cpu)
    return Copied(nbytes / seconds / 1e9, cpu * 1e9 / nbytes)


def uploads(
    ways: dict[str, Way], saved: Path, server: Path, rounds: int
) -> list[dict[str, Copied]]:
    """Return each round's uploads by client, after one round that does not count."""
    nbytes = sum(file.stat().st_size for file in saved.iterdir())
    found: list[dict[str, Copied]] = []
    for number in range(rounds + 1):
        found.append({})
        for turn, name in enumerate(in_turn(ways, number)):
            found[-1][name] = timed(ways[name], saved, f"up-{number}-{turn}", nbytes)
            stores.clear(server)
    return found[1:]


def downloads(
    ways: dict[str, Way], saved: Path, memory: Path, rounds: int
) -> list[dict[str, Copied]]:
    """Return each round's downloads by client, after one round that does not count."""
    nbytes = sum(file.stat().st_size for file in saved.iterdir())
    promote(saved, "down")
    found: list[dict[str, Copied]] = []
    for number in range(rounds + 1):
        found.append({})
        for name in in_turn(ways, number):
            found[-1][name] = timed(ways[name], memory / "down", "down", nbytes)
            shutil.rmtree(memory / "down", ignore_errors=True)
    return found[1:]


def in_turn(ways: dict[str, Way], number: int) -> list[str]:
    return list(ways) if number % 2 else list(reversed(ways))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = speed.parser(__doc__, "the disk to upload from")
    parser.add_argument("--json", type=Path, help="write the measurements there")
    parser.add_argument("--drop", action="store_true", help="the server drops what it gets")
    asked = parser.parse_args(arguments)
    with fresh_directory(asked.dir) as here, fresh_directory(_MEMORY) as memory:
        saved, server, log = here / "saved", memory / "server", here / "pip.log"
        ringstow.save(speed.state_of(asked.gb), saved)
        server.mkdir()
        with stores.dropping() if asked.drop else stores.serving(server):
            up = known({
                "ringstow.promote": promote,
                "boto3 (CRT)": stores.crt("up", log),
                "rclone copy": stores.rclone(),
                "DCP, FsspecWriter": stores.fsspec_writer(log),
            })  # fmt: skip
            found = {"upload": uploads(up, saved, server, asked.rounds)}
            if not asked.drop:
                down = known({
                    "ringstow.load": load,
                    "ringstow.load_into": load_into(asked.gb),
                    "boto3 (CRT)": stores.crt("down", log),
                })  # fmt: skip
                found["download"] = downloads(down, saved, memory, asked.rounds)
        about = machine(here)
    for what, all_rounds in found.items():
        print(ranked(what, all_rounds), end="\n\n")
    print(f"{asked.gb} GB, {asked.rounds} rounds, median (lowest to highest), {about}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": about, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
