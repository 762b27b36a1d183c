"""One rank's work in an export: the bytes that it writes, sends and receives."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable

import torch

from ringstow import _native
from ringstow._core._config import Config
from ringstow._core._waiting import patiently
from ringstow._ranks._team import Team
from ringstow._reports._io_reports import SaveReport
from ringstow._saving import _jobs
from ringstow._state.tensors import _torch
from ringstow._state.tensors._dequantize import Dense
from ringstow._state.tensors._memory import LazyMemory, LazyTensor, Memory, Placed
from ringstow.dcp._export_dequantized import LastMade
from ringstow.dcp._export_exchange import Cast, Inbox, Received, Round, Sent, parts
from ringstow.dcp._export_layout import Held, Local, Model
from ringstow.dcp._export_plan import Box, Piece, Shares, Unit, first_element

# Number of inboxes in memory: one is written while the next one arrives.
_INBOXES_MAX = 2
_POLL_S = 0.05

FileSpec = tuple[str, int, int]
"""A file's name, the bytes of its header, its length."""
_Place = tuple[int, int, int, int, int, int]


@dataclasses.dataclass
class Layout:
    """The place of each tensor of a model in the files."""

    files: list[FileSpec]
    places: list[tuple[int, int]]


class ShareWriter:
    """Writes one rank's units of a model's files."""

    def __init__(
        self,
        model: Model,
        mine: Held,
        layout: Layout,
        team: Team,
    ) -> None:
        """Compute what this rank writes, sends and receives.

        Args:
            model: the whole model of all ranks.
            mine: this rank's part.
            layout: the places in the files.
            team: the ranks.
        """
        self._team = team
        self._rank = team.rank
        self._model = model
        self._dtypes = [_torch.dtype_of(code, code) for code in model.codes]
        held: dict[tuple[str, Box], Local] = {}
        for chunk, local in zip(mine.chunks, mine.locals, strict=True):
            held.setdefault((chunk.name, chunk.box), local)
        self._held = held
        self._made = LastMade()
        self._items: list[Memory | LazyMemory] = []
        self._item_of: dict[int, int] = {}
        self._places: list[_Place] = []
        self._rounds: dict[int, Round] = {}
        self._last_round = 0
        sizes = [(header, length) for _, header, length in layout.files]
        for unit in Shares(model.tensors, sizes, layout.places, team.size).units():
            self._add(unit)
        self._inboxes = {
            number: Inbox(one.nbytes) for number, one in self._rounds.items() if one.nbytes
        }
        self._files = layout.files
        sent = (
            one for turn in self._rounds.values() for cuts in turn.sent.values() for one in cuts
        )
        self.sent_bytes = sum(one.region.elements() * one.cast.dtype.itemsize for one in sent)
        """Bytes that this rank sends to others."""

    def _add(self, unit: Unit) -> None:
        self._last_round = max(self._last_round, unit.round)
        is_writer = unit.writer == self._rank
        for piece in unit.pieces:
            (box, source), *others = piece.sources
            is_run = (
                not others
                and first_element(self._model.tensors[piece.tensor].shape, box) is not None
            )
            if is_run and source == unit.writer:
                if is_writer:
                    self._place_own(piece, box, unit.round)
            elif is_writer:
                self._receive(piece, unit.round)
            elif any(rank == self._rank for _, rank in piece.sources):
                self._send(piece, unit)

    def _cast(self, piece: Piece, box: Box) -> Cast:
        local = self._held[self._model.tensors[piece.tensor].name, box].tensor
        made = functools.partial(self._made.of, local) if isinstance(local, Dense) else local
        return Cast(box, made, self._dtypes[piece.tensor])

    def _place_own(self, piece: Piece, box: Box, turn: int) -> None:
        tensor = self._model.tensors[piece.tensor]
        begin = first_element(tensor.shape, box)
        assert begin is not None
        first, nbytes = piece.first - begin, piece.length * tensor.item_bytes
        cast = self._cast(piece, box)
        memory = self._held[tensor.name, box].memory
        if memory is not None and _torch.dtype_of(memory.dtype, tensor.name) == cast.dtype:
            item = self._item_of.setdefault(id(memory), len(self._items))
            if item == len(self._items):
                self._items.append(memory)
            self._place(piece, nbytes, (item, first * tensor.item_bytes), turn)
        else:
            load = functools.partial(_load, cast, first, piece.length)
            self._items.append(_lazy(nbytes, load))
            self._place(piece, nbytes, (len(self._items) - 1, 0), turn)

    def _place(self, piece: Piece, nbytes: int, at: tuple[int, int], turn: int) -> None:
        self._places.append((piece.file, piece.offset, *at, nbytes, turn))

    def _receive(self, piece: Piece, number: int) -> None:
        tensor = self._model.tensors[piece.tensor]
        turn = self._rounds.setdefault(number, Round())
        own = {box: self._cast(piece, box) for box, rank in piece.sources if rank == self._rank}
        turn.received.append(
            (Received(piece, tensor.shape, self._dtypes[piece.tensor], turn.nbytes), own)
        )
        for part in parts(piece, tensor.shape):
            if part.rank != self._rank:
                nbytes = part.region.elements() * tensor.item_bytes
                turn.expected[part.rank] = turn.expected.get(part.rank, 0) + nbytes
        nbytes = piece.length * tensor.item_bytes
        # Inboxes become items when the writing starts: until then -1 stands for the inbox of round
        # 1.
        self._place(piece, nbytes, (-number, turn.nbytes), number)
        turn.nbytes += nbytes

    def _send(self, piece: Piece, unit: Unit) -> None:
        turn = self._rounds.setdefault(unit.round, Round())
        for part in parts(piece, self._model.tensors[piece.tensor].shape):
            if part.rank == self._rank:
                cut = Sent(self._cast(piece, part.box), part.region)
                turn.sent.setdefault(unit.writer, []).append(cut)

    def write(self, directory: str, paths: list[str], config: Config) -> SaveReport:
        """Write, together with the other ranks, and return once this rank's bytes are durable.

        Raises:
            Error: another rank has failed.
            BaseException: this rank's own failure.
        """
        job: _native.SaveJob | None = None

        def begin() -> None:
            nonlocal job
            job = self._start(directory, paths, config)

        try:
            self._team.together(begin)
            assert job is not None
            for number in range(1, self._last_round + 1):
                self._team.together(functools.partial(self._prepare, job, number))
                if number in self._rounds:
                    self._rounds[number].exchange(self._team)
            return self._team.together(functools.partial(self._end, job))[self._rank]
        except BaseException as error:
            for inbox in self._inboxes.values():
                inbox.fail(error)
            if job is not None:
                _jobs.abandon(job)
            raise

    def _start(self, directory: str, paths: list[str], config: Config) -> _native.SaveJob:
        numbers = sorted(self._inboxes)
        item_of = {number: len(self._items) + at for at, number in enumerate(numbers)}
        items = [*self._items]
        items += [_lazy(self._inboxes[n].nbytes, self._inboxes[n].load) for n in numbers]
        used = sorted({place[0] for place in self._places})
        number_of = {file: number for number, file in enumerate(used)}
        files = [(paths[n], self._files[n][0], self._files[n][2]) for n in used]
        places = [
            (number_of[file], offset, item_of[-item] if item < 0 else item, begin, nbytes, turn)
            for file, offset, item, begin, nbytes, turn in self._places
        ]
        _wait_for_gpus(local.tensor for local in self._held.values())
        return _native.start_model_share(items, directory, files, places, config.to_json())

    def _prepare(self, job: _native.SaveJob, number: int) -> None:
        """Pass the previous round's bytes to the writer, and assemble the bytes to send now.

        Nothing fails between here and the end of the exchange, unless a rank is gone.
        """
        self._deliver(number - 1)
        early = [n for n in self._inboxes if n <= number - _INBOXES_MAX]
        if early:
            gone = self._inboxes[max(early)].is_gone
            while not gone.wait(_POLL_S) and not job.done():
                pass
        if job.done() and self._inboxes and max(self._inboxes) >= number:
            job.result()  # raises the failure: the job cannot have ended before this round
        if number in self._rounds:
            self._rounds[number].pack(self._team.device)

    def _deliver(self, number: int) -> None:
        turn = self._rounds.pop(number, None)
        if turn is not None and turn.nbytes:
            self._inboxes[number].deliver(turn.unpack())

    def _end(self, job: _native.SaveJob) -> SaveReport:
        self._deliver(self._last_round)
        patiently(job.wait, "an export waits until its files are durable")
        return SaveReport.from_json(job.result())


def _lazy(nbytes: int, load: Callable[[], Placed]) -> LazyMemory:
    owner = LazyTensor("U8", (nbytes,), nbytes, load)
    return LazyMemory("U8", (nbytes,), None, load, nbytes, owner)


def _load(cast: Cast, first: int, count: int) -> Placed:
    words = cast.run(first, count).cpu()
    return None, words.data_ptr(), words


def _wait_for_gpus(tensors: Iterable[torch.Tensor | Dense]) -> None:
    """Wait for queued GPU work on the tensors: other threads read them."""
    found = {tensor.device for tensor in tensors}
    devices = {one for one in found if one is not None and one.type == "cuda"}
    for device in devices:
        with contextlib.suppress(RuntimeError):
            torch.cuda.current_stream(device).synchronize()
