"""Load on all ranks of a group: each rank reads its own boxes, and all ranks fail together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ringstow import _foreign, _native
from ringstow._core import _arguments
from ringstow._core._arguments import StrPath, directory_to_read, object_url, to_read
from ringstow._core._config import Config, given, native_json, with_tiers, without_tiers
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import ReplacedCheckpointError
from ringstow._core._waiting import Again
from ringstow._ranks import _shared_fs_lag, _shared_reads
from ringstow._ranks._group import Group, group_of
from ringstow._ranks._shared_reads import SharedLoad
from ringstow._ranks._team import raise_first, sendable
from ringstow._reading import _load, _load_into, _load_plan, _resolve
from ringstow._reading._names import Names
from ringstow._reading._resolve import copies_of
from ringstow._reports import _done_callbacks
from ringstow._state.objects._state_dicts import Parts
from ringstow._state.tensors._memory import InFiles
from ringstow._state.tree._mismatch import Call, Filled, Mismatch
from ringstow._state.tree._rename import Given
from ringstow._state.tree._walk import flat_name
from ringstow.distributed import _node_files, _nodes
from ringstow.distributed._fetched_files import room
from ringstow.distributed._node_fetch import Needs
from ringstow.distributed._node_files import Whole
from ringstow.distributed._node_repair import Mender
from ringstow.distributed._write_plan import agreed, refuse_different_calls

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ringstow._reports._io_reports import LoadReport

LOAD_INTO = Call(
    "strict=False",
    frozenset({"cast", "prefix", "rename"}),
    load="ringstow.distributed.load",
)
_log = logging.getLogger("ringstow")


@_arguments.explained(_arguments.LOAD_INTO_ARGUMENTS)
def load_into(
    state_dict: dict[Any, Any],
    path: StrPath | Sequence[StrPath],
    *,
    group: dist.ProcessGroup | None = None,
    prefix: str | None = None,
    rename: Given | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    config: Config | None = None,
) -> LoadReport:
    """Load a checkpoint into the state dicts of all ranks.

    Call it on every rank of the group. Each rank reads the boxes of its current tensors: mesh,
    placements and number of ranks may differ from the save's. Also loads checkpoints of
    `ringstow.save` and ringstow.dcp. Changes nothing on any rank unless everything fits on all of
    them.

    Args:
        state_dict: this rank's state dict. DTensors and ShardedTensors are filled in place,
            everything else as by `ringstow.load_into`. A `PerRank` gets the value that the rank of
            the same number has saved.
        path: the checkpoint's directory or URL, or a list of the tiers of a run, of which the first
            rank finds the newest step; see `ringstow.load`.
        group: the ranks; None means all.
        prefix: load the part of the checkpoint below this name as if it were all of it.
        rename: maps parts of the checkpoint's names; see `ringstow.load_into`.
        strict: require that this rank's keys are in the checkpoint, and the checkpoint's on some
            rank. False loads the keys that both have, and the report lists the others; it is an
            error if that fills nothing on any rank.
        cast: convert floating-point and complex elements to the target's dtype.
        verify: verify every checksum chunk that is read before using any of it.
        allow_pickle: unpickle what was saved with ``allow_pickle``; this can run any code.
        config: the settings; None means the defaults.

    Returns:
        The report of this rank: bytes read and seconds taken.

    Raises:
        KeyMismatchError: lists every key of this rank that is missing, unexpected or different.
        Error: another rank failed; names it. After damage or a read error on any rank, the
            elements of the tensors are undefined on all.
        Exception: any error of `ringstow.load_into`.
    """
    names = Names(prefix, rename)
    return fill(
        state_dict,
        path,
        LOAD_INTO,
        names,
        group=group,
        strict=strict,
        cast=cast,
        verify=verify,
        allow_pickle=allow_pickle,
        config=config,
    )


@real_tensors()
def fill(
    state_dict: dict[Any, Any],
    path: StrPath | Sequence[StrPath],
    call: Call,
    names: Names | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    config: Config | None = None,
    ignored: Callable[[str], bool] = lambda name: False,
) -> LoadReport:
    """Load as `load_into` does; ``call`` has the caller's arguments.

    Names of the checkpoint that ``ignored`` accepts may be missing from all ranks.
    """
    ranks = group_of(group)
    names = names or Names()
    with ranks.turn.held(), _done_callbacks.failing("load", _resolve.shown(path)):
        path, config = _named(ranks, "load_into", path, config)
        ranks.doing = f"the load of {path}"
        where, settings, found = _meet(ranks, "load_into", path, config, strict, names=names)
        # Nodes that share no directory get the files that they lack from each other.
        copies = copies_of(where, given(config).tiers) if found is None else []
        parts = ranks.each(lambda: Parts(state_dict))
        again = Again()
        while True:
            with _fetching(ranks, where, found, settings) as needs:
                one = _Load(
                    ranks,
                    where,
                    copies,
                    needs,
                    apart=found is not None,
                    strict=strict,
                    names=names,
                    call=call,
                    ignored=ignored,
                )
                try:
                    report = one.run(
                        state_dict,
                        parts,
                        settings,
                        cast=cast,
                        verify=verify,
                        allow_pickle=allow_pickle,
                    )
                    break
                except ReplacedCheckpointError:
                    if not ranks.from_first(again.may_try):
                        raise
                except Exception:
                    if found is None or not found.mender.mend(one.errors):
                        raise
    _load.tell(report)
    return report


@real_tensors()
def load(
    path: StrPath | Sequence[StrPath],
    *,
    group: dist.ProcessGroup | None = None,
    prefix: str | None = None,
    keys: Iterable[str] | None = None,
    rename: Given | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    config: Config | None = None,
    device: str | torch.device | None = None,
    framework: Literal["torch", "numpy"] = "torch",
) -> dict[Any, Any]:
    """Load a checkpoint, or a part of it, into new full tensors on every rank.

    Call it on every rank of the group; if it fails on one rank, it fails on all. A `PerRank`
    becomes a dict of all ranks' values; its keys are the rank numbers as text.

    Args:
        path: the checkpoint's directory or URL, or a list of the tiers of a run.
        group: the ranks; None means all.
        prefix: select the leaf of this name and all leaves below it.
        keys: select the leaves of exactly these names.
        rename: give the result other names, and join or split its tensors; see `ringstow.load`.
        verify: verify every checksum chunk that is read before using any of it.
        allow_pickle: unpickle what was saved with ``allow_pickle``; this can run any code.
        config: the settings; None means the defaults.
        device: where to put torch tensors, such as ``"cuda"``; None means the CPU.
        framework: return torch tensors as ``"torch"`` tensors or ``"numpy"`` arrays. See
            `ringstow.load`.

    Returns:
        The state dict.

    Raises:
        Error: another rank failed; names it.
        Exception: any error of `ringstow.load`.
    """
    ranks = group_of(group)
    with ranks.turn.held():
        path, config = _named(ranks, "load", path, config)
        ranks.doing = f"the load of {path}"
        where, settings, found = _meet(ranks, "load", path, config, names=Names(rename=rename))
        while True:
            loaded: dict[Any, Any] = {}
            failure: BaseException | None = None
            shared = SharedLoad(ranks, settings, apart=found is not None)
            with _fetching(ranks, where, found, settings) as needs:
                try:
                    if needs is not None:
                        needs.fetch_all()
                    loaded, _ = _load.loaded(
                        where,
                        prefix=prefix,
                        keys=keys,
                        rename=rename,
                        verify=verify,
                        allow_pickle=allow_pickle,
                        config=_settings(config, found, needs),
                        device=device,
                        framework=framework,
                        planned=shared.planned,
                    )
                # Ctrl-C, too: the others must not wait for this rank.
                except BaseException as error:
                    failure = error
                try:
                    shared.end(failed=failure is not None)
                except BaseException as error:
                    failure = failure or error
                errors = [error for _, error in ranks.told(failure, None)]
                if not any(errors) or found is None or not found.mender.mend(errors):
                    break
    if failure is not None:
        raise failure
    raise_first(errors)
    return loaded


class _Found(NamedTuple):
    """A checkpoint of nodes that share no directory."""

    nodes: _nodes.Nodes
    whole: Whole
    mender: Mender


def _named(
    ranks: Group, call: str, path: StrPath | Sequence[StrPath], config: Config | None
) -> tuple[StrPath, Config | None]:
    """Return the path and the settings; for tiers, the newest step that the first rank sees.

    Raises:
        Exception: any error of `_meet`; for tiers, any error of `ringstow.load`.
    """
    if not isinstance(path, list | tuple):
        return path, config  # type: ignore[return-value]
    tiers: list[str] = []
    error: BaseException | None = None
    try:
        tiers = [directory_to_read(tier) for tier in path]
        config = with_tiers(config, tiers)
    except BaseException as caught:
        error = caught
    agreed(ranks, (call, "tiers", *tiers), None, error)
    return ranks.from_first(lambda: _resolve.find(tiers, config).path), config


def _meet(
    ranks: Group,
    call: str,
    path: StrPath,
    config: Config | None,
    *options: object,
    names: Names | None = None,
) -> tuple[str, str, _Found | None]:
    """Return the path and the configuration, once all ranks make the same call and see the path.

    If nodes share no directory, paths may differ; also returns which node has which file.

    Raises:
        BaseException: an error in this rank's arguments. Error: another rank's error, with its
            rank.
        InvalidStateError: the ranks make different calls.
    """
    where, settings = str(path), ""
    error: BaseException | None = None
    own = _node_files.Look()
    names = names or Names()
    options = (*options, *names.shown())
    try:
        names.check()
        where, settings = to_read(path), native_json(config)
        options = (*options, *_shared_reads.shown(settings))
        own = _node_files.look(where, settings)
    except BaseException as caught:
        error = caught
    is_there = object_url(where) is not None or os.path.exists(where)
    said = (where, own.seen, own.problem is not None, is_there)
    all_said = agreed(ranks, (call, os.path.basename(where), *options), said, error)
    all_seen = [one for _, one, *_ in all_said]
    if any(all_seen):
        if own.problem is not None:
            _log.warning("%s: taking the manifest of another node, since %s", where, own.problem)
        nodes = _nodes.meet(ranks, _nodes.run_of(where))
        whole = _node_files.find(ranks, nodes, where, own, all_seen)
        return where, settings, _Found(nodes, whole, Mender(ranks, nodes, whole, (where, settings)))
    if any(is_problem for _, _, is_problem, _ in all_said):
        ranks.agreed(own.problem, None)
    if any(there for *_, there in all_said):
        refuse_different_calls([(call, other, *options) for other, *_ in all_said])
    ranks.see(where)
    return where, settings, None


@contextlib.contextmanager
def _fetching(
    ranks: Group, path: str, found: _Found | None, settings: str
) -> Iterator[Needs | None]:
    """Return the fetcher from other nodes; None if all ranks share the directory."""
    if found is None or found.whole.is_on_all(ranks.size):
        yield None
        return
    with room(ranks, found.nodes, found.whole, path, settings) as made:
        yield Needs(ranks, found.nodes, found.whole, path, made)


def _settings(config: Config | None, found: _Found | None, needs: Needs | None) -> Config | None:
    """Return settings that load from local files and from files that other nodes have sent."""
    if found is None:
        return config
    # Nodes that share no directory get the files that they lack from each other.
    settings = without_tiers(given(config))
    if needs is None:
        return settings
    return dataclasses.replace(settings, stripe=(*settings.stripe, needs.room.stripe))


class _Compared(NamedTuple):
    """The result of a rank's comparison."""

    unexpected: frozenset[str]
    """Keys of the checkpoint that this rank does not have."""
    fits: bool
    """Whether all that this rank has is in the checkpoint, and alike."""
    filled: Filled
    """How many tensors a load without ``strict`` fills."""
    needs: _shared_reads.Needs | None
    """What this rank reads."""


class _Opened:
    """A rank's message about its load: its failure, or the checkpoint that it has opened."""

    def __init__(
        self, error: BaseException | None, stamp: str | None, compared: _Compared | None
    ) -> None:
        self.error = None if error is None else sendable(error)
        self.stamp = stamp
        self.compared = compared


class _Load:
    """One attempt of this rank to load."""

    def __init__(
        self,
        ranks: Group,
        path: str,
        copies: list[str],
        needs: Needs | None,
        *,
        apart: bool,
        strict: bool,
        names: Names,
        call: Call,
        ignored: Callable[[str], bool],
    ) -> None:
        self._ranks = ranks
        self._path = path
        self._copies = copies
        self._needs = needs
        self._apart = apart
        self._settings = ""
        self._strict = strict
        self._names = names
        self._call = call
        self._ignored = ignored
        self._stamp: str | None = None
        self.errors: list[BaseException | None] = []
        """Each rank's error; None on ranks without a failure."""
        self._found: Mismatch | None = None
        self._checkpoint: _native.Checkpoint | None = None
        self._reads: _shared_reads.Needs | None = None
        self._sharing: _shared_reads.Sharing | None = None

    def run(
        self,
        state: dict[Any, Any],
        parts: Parts,
        settings: str,
        *,
        cast: bool,
        verify: bool,
        allow_pickle: bool,
    ) -> LoadReport:
        """Load; the ranks synchronize before the first change, and after all reads."""
        load, rank = self, self._ranks.rank

        class Merge(_load_plan.Merge):
            def check(self, found: Mismatch, *, strict: bool) -> None:
                # `_ready` decides: other ranks may have keys that this rank lacks.
                more = [gap for gap in found.unexpected if not load._ignored(flat_name(gap[0]))]
                load._found = dataclasses.replace(found, unexpected=more)
                if not load._fits():
                    load._ready()

        Merge.rank = rank
        report: LoadReport | None = None
        error: BaseException | None = None
        settings = settings if self._needs is None else self._needs.room.config
        self._settings = settings
        try:
            checkpoint = self._opened(settings, verify=verify, allow_pickle=allow_pickle)
            report = _load_into.load_into(
                state,
                self._path,
                checkpoint,
                strict=self._strict,
                skips=False,
                allow_pickle=allow_pickle,
                cast=cast,
                ready=self._ready,
                read=self._all_have_read if parts.communicate else lambda: None,
                fetch=self._planned if self._plans() else None,
                kind=Merge,
                parts=parts,
                names=self._names,
                call=self._call,
            )
        except BaseException as caught:
            error = caught
        if isinstance(error, _TogetherError):
            raise error.cause from None
        self._say(error)
        assert report is not None
        return report

    def _opened(
        self, settings: str, *, verify: bool, allow_pickle: bool
    ) -> _native.Checkpoint | _foreign.Foreign:
        """Open the checkpoint, also if another program wrote it."""
        others = _foreign.opened(self._path, settings, verify=verify, allow_pickle=allow_pickle)
        if others is not None:
            return others
        checkpoint = _shared_fs_lag.opened(
            self._path,
            lambda: _native.Checkpoint(
                self._path, settings, copies=self._copies, foreign=True, verify=verify
            ),
        )
        self._stamp = checkpoint.stamp
        self._checkpoint = checkpoint
        return checkpoint

    def _plans(self) -> bool:
        """Return whether it matters what this rank reads; the same on all ranks."""
        if self._checkpoint is None:  # another program's files
            return False
        may_pay = _shared_reads.may_pay(self._ranks, self._checkpoint, self._settings)
        return self._needs is not None or may_pay

    def _planned(self, first: InFiles, then: InFiles) -> None:
        """Note what this rank is about to read, and fetch it from other nodes if need be."""
        checkpoint = self._checkpoint
        assert checkpoint is not None
        (names, boxes), settings = then, self._settings
        passes = [(names, []), ([], boxes)]
        if _shared_reads.may_pay(self._ranks, checkpoint, settings):
            self._reads = _shared_reads.Needs.of(self._ranks, checkpoint, passes, settings)
        if self._needs is not None:
            with _together():
                self._say(None)  # a failed rank takes no part in the following steps
                every = (first[0] + names, first[1] + boxes)
                self._needs.fetch(checkpoint, _native.needed(checkpoint, *every))

    def _all_have_read(self) -> None:
        """Continue if all ranks have read their parts."""
        with _together():
            self._say(None)

    def _fits(self) -> bool:
        """Return whether all that this rank has is in the checkpoint, and alike."""
        found = self._found
        assert found is not None
        return not found.different and not (self._strict and found.missing)

    def _ready(self) -> None:
        """Continue if nothing has failed on any rank, and everything fits on all of them.

        A rank whose state dict does not fit calls this at once; all others call it before they
        change anything.
        """
        found = self._found
        assert found is not None
        filled = Filled(1, 1, 0, 0) if found.state else Filled(0, 0, 0, 0)
        if not self._strict and found.missing:
            filled = found.filled()
        unexpected = frozenset(flat_name(path) for path, _ in found.unexpected)
        with _together():
            said = self._gathered(None, _Compared(unexpected, self._fits(), filled, self._reads))
            compared = [one for one in said if one is not None]
            of_all = frozenset.intersection(*(one.unexpected for one in compared))
            found = dataclasses.replace(
                found, unexpected=[gap for gap in found.unexpected if flat_name(gap[0]) in of_all]
            )
            are_left = self._strict and bool(of_all)
            if are_left or not all(one.fits for one in compared):
                is_right = self._fits() and not are_left
                self._gathered(None if is_right else found.error(strict=self._strict), None)
            if not self._strict:
                _load_plan.judge(found, [one.filled for one in compared], self._ranks.rank)
            needs = [one.needs for one in compared if one.needs is not None]
            checkpoint = self._checkpoint if len(needs) == self._ranks.size else None
            if checkpoint is not None:
                self._sharing = _shared_reads.Sharing(
                    self._ranks, checkpoint, needs, self._settings, apart=self._apart
                )

    def _say(self, error: BaseException | None) -> None:
        """End what the ranks share, and raise on all of them if one has failed."""
        if self._sharing is not None:
            try:
                self._sharing.end(failed=error is not None)
            except BaseException as interrupt:
                error = error or interrupt
        self._gathered(error, None)

    def _gathered(
        self, error: BaseException | None, compared: _Compared | None
    ) -> list[_Compared | None]:
        """Return the comparisons of all ranks, if none has failed."""
        all_said = self._ranks.gathered(_Opened(error, self._stamp, compared))
        self.errors = [one.error for one in all_said]
        failures = [one.error for one in all_said if one.error is not None]
        if failures and all(isinstance(one, ReplacedCheckpointError) for one in failures):
            raise failures[0]
        if error is not None:
            raise error
        raise_first(one.error for one in all_said)
        stamps = {one.stamp for one in all_said}
        if len(stamps) > 1:
            raise ReplacedCheckpointError(f"{self._path} was replaced while the ranks opened it")
        return [one.compared for one in all_said]


class _TogetherError(Exception):
    """An error that all ranks raise, so that none waits for another."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Mark an error as raised on all ranks."""
    try:
        yield
    except BaseException as error:
        raise _TogetherError(error) from None
