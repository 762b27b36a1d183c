"""The checkpoints of one Accelerator: its ranks save, find and load them here."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ringstow._core._arguments import absolute
from ringstow._core._errors import InvalidStateError
from ringstow._manager._when import Schedule
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._accelerate import _places, _states, _whole
from ringstow.integrations._kit import _values, ranks_or_alone
from ringstow.integrations._kit._in_flight import InFlight, Publication

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._core._when import When
    from ringstow._ranks._team import Team
    from ringstow._saving._guard import Staging
    from ringstow._saving._save_future import SaveHandle
    from ringstow.integrations._kit._ranks import Ranks

_log = logging.getLogger("ringstow")


class Options(NamedTuple):
    """The settings of saves; the same on all ranks."""

    config: Config | None
    staging: Staging
    allow_pickle: bool


class Checkpoints:
    """The checkpoints of one Accelerator. All ranks call each method together."""

    def __init__(self, accelerator: Any, options: Options) -> None:
        self._accelerator = accelerator
        self._options = options
        self._made: Team | None = None
        torn = f'In Accelerate: {type(accelerator).__name__}(staging="wait")'
        self._flight = InFlight(torn=torn)
        self._part: str | None = None
        self.schedule: Schedule | None = None
        """Answers when to save; None without a policy."""

    def ask(self, when: When) -> None:
        """Handle the signals of a policy."""
        self.schedule = Schedule(when, self._ranks, self._accelerator.project_dir or os.getcwd())

    def __reduce__(self) -> tuple[type[Checkpoints], tuple[Any, Options]]:
        """Pickle without saves and ranks: a dataloader's worker may receive the Accelerator."""
        return type(self), (self._accelerator, self._options)

    @property
    def _ranks(self) -> Team:
        """The ranks; created together by all ranks before the first use."""
        if self._made is None:
            self._made = ranks_or_alone(*self._options)
        return self._made

    # The methods of a save.

    def save(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Start a save, and return its final path."""
        if self.schedule is not None:
            self.schedule.heed()
        shown = self._ranks.from_first(lambda: self._prepare(output_dir))
        final = absolute(shown)
        self._part = part = _rename_when_complete.hidden(final)
        who = f"In Accelerate: {type(self._accelerator).__name__}"
        try:
            with _values.explaining_pickles(who, allow_pickle=self._options.allow_pickle):
                self._start(part, final)
        except BaseException:  # also Ctrl-C
            self._discard()
            raise
        return shown

    def wait(self) -> None:
        """Wait until the save in progress is complete.

        Raises:
            BaseException: the save's failure, on all ranks; once.
        """
        try:
            self._ranks.agree(self._flight.end())
        except BaseException:
            self._discard()  # no rank writes there now
            raise

    def close(self) -> None:
        """Drop the objects that end with the process group; all ranks call it."""
        schedule, self.schedule, self._made = self.schedule, None, None
        if schedule is not None:
            schedule.close(settles=True)

    def _discard(self) -> None:
        """Remove the hidden directory of a save that failed."""
        if self._ranks.is_first and self._part is not None:
            shutil.rmtree(self._part, ignore_errors=True)

    def _prepare(self, output_dir: str | os.PathLike[str] | None) -> str:
        """Make the hidden directory, on rank 0; return its final path."""
        if self._is_named():
            names = _places.NAMES
            shown = os.path.join(self._root(), f"checkpoint_{self._accelerator.save_iteration}")
            if output_dir is not None:
                _log.warning(
                    "automatic_checkpoint_naming saves to %s, and output_dir=%r has no effect: "
                    "leave it out",
                    shown,
                    output_dir,
                )
            number = _places.next_number(self._root())
            if os.path.lexists(shown) or number > self._accelerator.save_iteration:
                raise ValueError(
                    f"{shown} exists already, or one with a higher number: call load_state() "
                    "before the first save, or set accelerator.project_configuration.iteration to "
                    f"{number} or more"
                )
        elif output_dir is None:
            raise InvalidStateError(
                "save_state needs output_dir=, or an Accelerator with "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        else:
            shown = os.path.expanduser(os.fspath(output_dir))
            names = re.compile(re.escape(os.path.basename(absolute(shown))))
            _places.check_replaced(absolute(shown))
        os.mkdir(os.path.join(_rename_when_complete.prepare(absolute(shown), names), _places.HOOKS))
        return shown

    def _start(self, part: str, final: str) -> None:
        """Run the hooks, and start the save."""
        folder = os.path.join(part, _places.HOOKS)
        # Every rank calls every object's ``state_dict``, as the Accelerator does: some need all
        # ranks.
        accelerator = self._accelerator
        weights, common, own = self._ranks.each(
            lambda: (self._run_hooks(folder), _states.common(accelerator), _states.own(accelerator))
        )
        all_own = self._ranks.gathered(own)

        def meta() -> dict[str, Any]:
            """Return, on rank 0, all state that belongs to no model and no optimizer."""
            ranks, is_sharded = len(all_own), self._is_sharded()
            counts = _states.counts(accelerator, None if is_sharded else len(weights))
            names = _places.hooks_files(part)
            _places.Mark(ranks, is_sharded, counts, names).write(folder)
            return {**common, "ranks": all_own}

        if self._is_sharded():
            handle: SaveHandle | None = self._start_shards(part, meta)
        else:
            handle = self._start_whole(part, meta, weights)
        if handle is not None:
            if self.schedule is not None:
                self.schedule.follow(handle)
            self._follow(handle, part, final)

    def _follow(self, handle: SaveHandle, part: str, final: str) -> None:
        """Let rank 0 complete the save, once it has committed."""
        if not self._ranks.is_first:
            self._flight.handle = handle
            return
        limit = self._project().total_limit if self._is_named() else None
        how = Publication(
            part,
            final,
            seal=lambda: _places.seal(part),
            stale=lambda: _places.stale(final, limit),
            limit="total_limit",
            may_replace=_places.check_replaced,
            is_alone=not self._is_sharded(),
        )
        self._flight.publish(handle, how)

    def _start_whole(
        self, part: str, meta: Callable[[], dict[str, Any]], weights: list[dict[str, Any]]
    ) -> SaveHandle | None:
        """Start to save, on rank 0."""

        def start() -> SaveHandle | None:
            optimizers = _whole.optimizers(self._accelerator)
            if not self._ranks.is_first:
                return None
            more, options = meta(), self._options
            if options.staging == "guard" and _values.has_large(more):
                options = options._replace(staging="wait")
            step = self._step()
            return _whole.start(weights, optimizers, more, part, step=step, **options._asdict())

        return self._ranks.each(start)

    def _start_shards(self, part: str, meta: Callable[[], dict[str, Any]]) -> SaveHandle:
        """Start to save, on all ranks."""
        from ringstow.integrations._accelerate import _shards

        def collect() -> dict[str, Any]:
            if not self._ranks.is_first:
                return _shards.collect(self._accelerator, None)
            more = meta()
            _shards.check(more, allow_pickle=self._options.allow_pickle)
            return _shards.collect(self._accelerator, more)

        state = self._ranks.each(collect)
        apart = [name for name in state if _states.is_optimizers(name)]
        handle = self._of_several().save_async(state, part, self._step(), apart=apart)
        if _values.has_large(state.get(_states.ACCELERATOR)):
            handle.wait_staged()
        return handle

    def _of_several(self) -> Ranks:
        """Return the ranks of FSDP2, which needs a process group even for one rank."""
        return cast("Ranks", self._ranks)

    def _run_hooks(self, folder: str) -> list[dict[str, Any]]:
        """Call the save hooks; return the weights that they leave to the save."""
        weights = [] if self._is_sharded() else _whole.weights(self._accelerator)
        for hook in self._accelerator._save_model_state_pre_hook.values():
            hook(self._accelerator._models, weights, folder)
        return weights

    # The methods of a load.

    def newest(self) -> str | None:
        """Return the newest complete checkpoint of automatic naming."""
        return self._ranks.from_first(self._newest)

    def find(self, input_dir: str | os.PathLike[str] | None) -> tuple[str, _places.Mark | None]:
        """Return a checkpoint's path, and its mark if ringstow saved it; rank 0 reads it."""
        return self._ranks.from_first(lambda: self._find(input_dir))

    def load(self, path: str, mark: _places.Mark, *, strict: bool) -> None:
        """Load a checkpoint that ringstow saved."""
        if mark.is_sharded != self._is_sharded():
            kinds = {True: "FSDP2", False: "one process or DDP"}
            raise InvalidStateError(
                f"{path} was saved by {kinds[mark.is_sharded]}, and this is "
                f"{kinds[self._is_sharded()]}, which keeps its optimizer in another way: use "
                f"ringstow.load({path!r}, prefix='model') for the weights"
            )
        load = self._load_shards if mark.is_sharded else self._load_whole

        self._ranks.see(path)

        def load_all() -> None:
            meta = load(path, mark, strict)
            _states.put_common(self._accelerator, meta)
            _states.put_own(self._accelerator, meta["ranks"], path)

        self._ranks.each(load_all)

    def number_next(self) -> None:
        """Give the next save of automatic naming a number above all existing ones."""
        if self._is_named():
            number = self._ranks.from_first(lambda: _places.next_number(self._root()))
            self._project().iteration = max(self._project().iteration, number)

    def _newest(self) -> str | None:
        if not self._is_named():
            raise InvalidStateError(
                "latest_checkpoint needs ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        objects = len(self._accelerator._custom_objects)
        found, halves = _places.newest(self._root(), objects)
        if halves:
            _log.warning(
                "passed over, since their saves were killed or more objects are registered now: %s",
                ", ".join(halves),
            )
        return found

    def _find(self, input_dir: str | os.PathLike[str] | None) -> tuple[str, _places.Mark | None]:
        if input_dir is not None:
            path = os.path.expanduser(os.fspath(input_dir))
            found = _places.to_load(path)
            if found is None:
                raise ValueError(f"Tried to find {path} but folder does not exist")
        elif not self._is_named():
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        else:
            found = self._newest()
            if found is None:
                raise FileNotFoundError(
                    errno.ENOENT, "No complete checkpoint is in the directory", self._root()
                )
        mark = _places.mark_of(found)
        if mark is None and os.path.exists(os.path.join(found, "manifest.json")):
            raise InvalidStateError(
                f"{found} was not saved by RingstowAccelerator: load it by ringstow.load or "
                "ringstow.dcp"
            )
        if mark is None and not _places.is_stock(found):
            raise FileNotFoundError(
                errno.ENOENT, "This is no checkpoint: no file in it is one of Accelerate's", found
            )
        return found, mark

    def _load_whole(self, path: str, mark: _places.Mark, strict: bool) -> dict[str, Any]:
        accelerator, options = self._accelerator, self._options
        models = list(accelerator._models)
        self._run_load_hooks(models, path)
        _states.check_counts(accelerator, mark.counts, len(models), path)
        return _whole.load_into(
            accelerator,
            models,
            path,
            strict=strict,
            config=options.config,
            allow_pickle=options.allow_pickle,
        )

    def _load_shards(self, path: str, mark: _places.Mark, strict: bool) -> dict[str, Any]:
        from ringstow.integrations._accelerate import _shards

        accelerator = self._accelerator
        # Check on all ranks: a rank with other objects must not leave the others waiting in the
        # load.
        self._ranks.each(lambda: _states.check_counts(accelerator, mark.counts, None, path))
        meta = _shards.load_into(accelerator, path, self._of_several(), strict=strict)
        self._run_load_hooks([], path)
        return meta

    def _run_load_hooks(self, models: list[Any], path: str) -> None:
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, path)

    # The Accelerator's settings.

    def _project(self) -> Any:
        return self._accelerator.project_configuration

    def _is_named(self) -> bool:
        return bool(self._project().automatic_checkpoint_naming)

    def _is_sharded(self) -> bool:
        return bool(self._accelerator.is_fsdp2)

    def _step(self) -> int | None:
        """Return the step number for the manifest."""
        return self._accelerator.save_iteration if self._is_named() else None

    def _root(self) -> str:
        """Return the directory in which Accelerate names the checkpoints itself."""
        folder = self._accelerator.project_dir
        if folder is None:
            raise InvalidStateError(
                "automatic_checkpoint_naming needs a directory: give "
                "ProjectConfiguration(project_dir=...)"
            )
        return os.path.join(os.path.expanduser(folder), "checkpoints")
