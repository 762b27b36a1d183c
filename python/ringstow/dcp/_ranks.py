"""How several ranks save and load for a framework's adapter, by torch.distributed.checkpoint.

Rank 0 looks into the directory and removes old steps. Before each call the ranks tell each other
what they call and what has failed, so that all of them fail together.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful

from ringstow import _native, foreign
from ringstow._alone import Attempt
from ringstow._config import Config, native_json, with_tiers
from ringstow._damage import is_damage
from ringstow._errors import Error, InvalidStateError
from ringstow._metrics import metrics_of
from ringstow.dcp import _latest, _paths, _private
from ringstow.dcp._handle import OwnPart, RanksHandle
from ringstow.dcp._metadata import dropped_from
from ringstow.dcp._others_reader import OthersReader
from ringstow.dcp._planner import LoadPlanner
from ringstow.dcp._reader import StorageReader
from ringstow.dcp._stream import StagingFuture
from ringstow.dcp._together import agree, each, from_first, gathered, sendable
from ringstow.dcp._writer import StorageWriter
from ringstow.tree._mismatch import Call

if TYPE_CHECKING:
    from ringstow._base import Base
    from ringstow._catalog_report import Step
    from ringstow._guard import Staging
    from ringstow._report import SaveReport

_T = TypeVar("_T")
_log = logging.getLogger("ringstow")


class Ranks:
    """The ranks of one process group."""

    _stages_by_dcp = True

    def __init__(
        self,
        config: Config | None,
        staging: Staging,
        allow_pickle: bool,
        group: dist.ProcessGroup | None,
        apart: tuple[str, ...] = (),
    ) -> None:
        if staging == "unguarded":
            raise InvalidStateError(
                'staging="unguarded" is not for several ranks: use "guard", which copies no large '
                'tensor either, or "snapshot"'
            )
        if self._stages_by_dcp and staging != "snapshot" and not _takes_stager():
            _log.warning(
                'staging="snapshot" is used, not %r: async_save of this torch takes no stager',
                staging,
            )
            staging = "snapshot"
        self._config = config
        self._staging = staging
        self._given = group
        self._allow_pickle = allow_pickle
        self._apart = apart
        # A background save communicates in a thread: not in a group that training uses.
        self._own = dist.new_group(backend="gloo") if group is None else None
        self._group = cast("dist.ProcessGroup", self._own if group is None else group)
        if dist.get_rank(self._group) < 0:
            raise InvalidStateError(
                f"rank {dist.get_rank()} is not in the manager's group: make the manager on the "
                "group's ranks only"
            )
        self.is_first = dist.get_rank(self._group) == 0
        self.leads = self.is_first
        self._writer = StorageWriter(config=config, allow_pickle=allow_pickle, apart=apart)

    def check(self) -> None:
        if not dist.is_initialized():
            raise InvalidStateError(
                "the process group has ended, and the manager needs it: close the manager first"
            )

    def meet(self, call: tuple[object, ...], failure: BaseException | None, said: _T) -> list[_T]:
        """Fail on all ranks if the save before failed on one, or if they call different things."""
        own = (call, None if failure is None else sendable(failure), said)
        try:
            all_said = gathered(own, self._group)
        except BaseException:
            if failure is not None:
                raise failure from None
            raise
        if failure is not None:
            raise failure
        for rank, (_, other, _) in enumerate(all_said):
            if other is not None:
                raise Error(f"the save before failed on rank {rank}: {other}") from other
        if any(other != call for other, _, _ in all_said):
            calls = "; ".join(
                f"rank {rank}: {name}{arguments}"
                for rank, ((name, *arguments), _, _) in enumerate(all_said)
            )
            raise InvalidStateError(
                f"the ranks do not make the same call of the manager: {calls}. Call each method on "
                "every rank, in the same order and with the same step"
            )
        return [one for _, _, one in all_said]

    def each(self, work: Callable[[], None]) -> None:
        each(work, self._group)

    def first(self, look: Callable[[], _T]) -> _T:
        return from_first(look, self._group)

    def save(
        self,
        state: dict[Any, Any],
        path: str,
        step: int | None,
        metrics: Mapping[str, Any] | None = None,
        base: Base | None = None,
        apart: Iterable[str] | None = None,
    ) -> SaveReport:
        """Save; ``apart`` is the same on all ranks, and None means the one before."""
        self._note(step, metrics, base, apart)
        return self._save(state, path)

    def _save(self, state: dict[Any, Any], path: str) -> SaveReport:
        self._writer._part = None
        save(state, checkpoint_id=path, storage_writer=self._writer, process_group=self._group)
        return self._written()

    def save_async(
        self,
        state: dict[Any, Any],
        path: str,
        step: int | None,
        metrics: Mapping[str, Any] | None = None,
        base: Base | None = None,
        apart: Iterable[str] | None = None,
    ) -> RanksHandle:
        """Save in the background, as `save` does."""
        self._note(step, metrics, base, apart)
        return self._start(state, path)

    def _start(self, state: dict[Any, Any], path: str) -> RanksHandle:
        options: dict[str, Any] = {}
        part = self._writer._part = OwnPart()
        if _takes_stager():
            stager = self._writer if self._staging == "snapshot" else self._writer.stager()
            options["async_stager"] = _Together(stager, self._group)
        response = async_save(
            state,
            checkpoint_id=path,
            storage_writer=self._writer,
            process_group=self._group,
            **options,
        )
        upload: concurrent.futures.Future[Any]
        staged: concurrent.futures.Future[None] | None = None
        if isinstance(response, concurrent.futures.Future):
            upload = response
        else:
            upload, staged = response.upload_completion, response.staging_completion
        handle = RanksHandle(path, upload, staged, self._written, part)
        if self._staging == "wait":
            with contextlib.suppress(Exception):  # result() raises it
                handle.wait_staged()
        return handle

    def _written(self) -> SaveReport:
        """Return the report of this rank's last save."""
        assert self._writer.report is not None
        return self._writer.report

    def _note(
        self,
        step: int | None,
        metrics: Mapping[str, Any] | None,
        base: Base | None,
        apart: Iterable[str] | None,
    ) -> None:
        """Give the writer what the manifest is to note; fail on all ranks if one can't."""

        def note() -> None:
            self._writer.note(step=step, metrics=metrics_of(metrics))
            self._writer.set_base(base)
            if apart is not None:
                self._writer.set_apart(apart)

        each(note, self._group)

    def check_into(self, into: dict[Any, Any] | None) -> None:
        error = None
        if not isinstance(into, dict):
            error = InvalidStateError(
                "several ranks restore into a state dict, which says which shards each of them "
                "has: restore(into={'model': model, 'optimizer': optimizer})"
            )
        agree(error, self._group)

    def load(
        self,
        found: Step,
        into: dict[Any, Any] | None,
        tiers: Sequence[str] = (),
        *,
        strict: bool = True,
        call: Call | None = None,
    ) -> Attempt:
        assert into is not None
        error: BaseException | None = None
        attempt = Attempt(into)
        planner = LoadPlanner(strict=strict)
        planner.must_fill = not strict
        planner.call = call or Call("strict=False")
        planner.elsewhere = self._names(into)
        try:
            if found.status != "committed":  # DCP hides why: open it once for the reason
                knobs = native_json(self._config)
                self.first(lambda: str(_native.Checkpoint(found.path, knobs).kind))
            reader = self._reader(found.path, tiers)
            _latest.agree_on(found.path, self._group)
            load(
                into,
                checkpoint_id=found.path,
                storage_reader=reader,
                planner=planner,
                process_group=self._group,
            )
            if planner.metadata is not None:
                attempt = Attempt(into, dropped=dropped_from(planner.metadata))
        except (Exception, CheckpointException) as caught:  # DCP's is no Exception
            error = caught
        return self._attempt(found.path, error, attempt)

    def _attempt(self, path: str, error: BaseException | None, loaded: Attempt) -> Attempt:
        """Return what has become of a load on all ranks; ``error`` is this rank's."""
        said = None if error is None else (_is_damage(error), sendable(error))
        failed = [(rank, one) for rank, one in enumerate(gathered(said, self._group)) if one]
        if not failed:
            return loaded
        if error is None:
            rank, (_, other) = failed[0]
            error = Error(f"rank {rank} could not load {path}: {other}")
        return Attempt(error=error, is_damage=all(one[0] for _, one in failed))

    def _reader(self, path: str, tiers: Sequence[str]) -> StorageReader | OthersReader:
        """Return what reads a checkpoint: of ringstow's, or a directory of torch's own."""
        kind = self.first(lambda: None if is_ours(path) else foreign.kind_of(path))
        if kind is None:
            config = with_tiers(self._config, tiers)
            return StorageReader(config=config, allow_pickle=self._allow_pickle)
        if kind != "dcp":
            raise InvalidStateError(
                f"{path} is a checkpoint of another program ({kind}), and several ranks restore "
                "ringstow's and torch.distributed.checkpoint's: load it by ringstow.load(path) on "
                "each rank and put it into the model, or convert it once by `ringstow convert`"
            )
        reader = OthersReader(path, allow_pickle=self._allow_pickle)
        # DCP hides why this fails: read it once for the reason.
        self.first(lambda: len(reader.read_metadata().state_dict_metadata))
        return reader

    def _names(self, into: dict[Any, Any]) -> set[str]:
        """Return the keys of all ranks' state dicts: each may have some of its own."""
        states = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in into.items()}
        return set().union(*gathered(list(_private.flattened(states)[0]), self._group))

    def close(self) -> None:
        self._writer.close()
        if self._own is not None and dist.is_initialized():
            with contextlib.suppress(Exception):  # it may have ended with the ranks
                dist.destroy_process_group(self._own)
            # Its connections end with the last reference: ranks that wait for this one notice.
            self._own = self._group = cast("dist.ProcessGroup", None)


def _is_damage(error: BaseException) -> bool:
    """Return whether all ranks that failed met damage: DCP raises one error for all."""
    if isinstance(error, CheckpointException):
        return all(is_damage(one) for one, _ in error.failures.values())
    # The cause of another rank's failure is the error that it met.
    return any(is_damage(one) for one in (error, error.__cause__) if one is not None)


def is_ours(path: str) -> bool:
    """Return whether a directory is a checkpoint of ringstow's."""
    return any(
        os.path.exists(os.path.join(one, _paths.MANIFEST))
        for one in (path, _paths.of_rank(path, 0))
    )


def _takes_stager() -> bool:
    return "async_stager" in inspect.signature(async_save).parameters


class _Together(AsyncStager):
    """A stager that fails on all ranks if it fails on one: the others would wait for that one."""

    _synchronize_after_execute = False

    def __init__(self, stager: AsyncStager, group: dist.ProcessGroup) -> None:
        self._stager = stager
        self._group = group

    def stage(self, state_dict: dict[str, Any]) -> Any:
        staged: Any = None
        error: Exception | None = None
        try:
            staged = self._stager.stage(state_dict)
        except Exception as caught:
            error = caught
        try:
            agree(error, self._group)
        except BaseException as failure:
            if isinstance(staged, StagingFuture):
                staged.fail(failure)  # steps must not wait for it
            raise
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing: the stager's future says when staging ends."""

    def close(self) -> None:
        """Do nothing: the stager belongs to the writer."""
