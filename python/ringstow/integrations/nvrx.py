"""NVIDIA Resiliency Extension's local checkpoints by ringstow: `LocalCheckpointManager` for NVRx's.

Needs the package ``nvidia-resiliency-ext``. See docs/trainers/large-scale.md for benefits and
limits.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
    SameMachineReplicationException,
)
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import ReplicationStrategy

from ringstow._core._arguments import absolute
from ringstow._core._config import Config
from ringstow._core._errors import BusyError, Error, InvalidStateError
from ringstow._ranks._group import team_of
from ringstow._reading._load import load
from ringstow._reading._run_steps import prune, remove, steps, verify
from ringstow._saving._save import save
from ringstow.integrations._kit._framework_check import Seam
from ringstow.integrations._kit._refusals import refuse_tiers

__all__ = ["LocalCheckpointManager"]

_NAME = re.compile(r"iter_(\d{7,})_(\d+)_local")
_log = logging.getLogger("ringstow")

# The methods of NVRx's manager that this one overrides: the required ones, and others.
_HOOKS = {
    "_my_ckpt_ids": "",
    "_load": "ckpt_id",
    "_save": "state_dict ckpt_id",
    "_cleanup": "iteration",
    "_cleanup_failed_save": "iteration",
}
_METHODS = {
    **_HOOKS,
    "_save_fn": "id_to_state_dict",
    "find_latest": "",
    "load": "",
    "save": "state_dict iteration is_async",
}


def _check_seam(base: Any) -> None:
    """Refuse an NVRx whose manager calls other methods.

    Raises:
        UnsupportedError: names the differences.
    """
    hooks = {base: frozenset(_HOOKS)}
    Seam("nvidia-resiliency-ext", "0.4", "large-scale", {base: _METHODS}, hooks).check()


_check_seam(BaseCheckpointManager)


class LocalCheckpointManager(BaseCheckpointManager):
    """NVRx's manager of local checkpoints, with durable saves and verified bytes.

    Takes the arguments of NVRx's ``LocalCheckpointManager``, and the others by name:

    Args:
        root_local_ckpt_dir: a directory on a local disk.
        session_id: distinguishes runs that share the directory.
        repl_strategy: NVRx's strategy of replication; None for no replicas.
        state_dicts: further classes of state dicts whose attributes ringstow can save, beside
            ``BasicTensorAwareStateDict``. A load makes only objects of these classes.
        verify: verify all bytes of this rank before the first load. A damaged checkpoint then
            counts as missing: NVRx takes a replica or an older one.
        config: ringstow's settings; None means the defaults.
        allow_pickle: pickle state dicts of any class, without their tensors, and unpickle them,
            which can run any code.

    Raises:
        InvalidStateError: the directory is a URL.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        state_dicts: Iterable[type[TensorAwareStateDict]] = (),
        verify: bool = True,
        config: Config | None = None,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(session_id, repl_strategy)
        refuse_tiers(config)
        self._root = absolute(root_local_ckpt_dir)
        self._classes = {_name_of(one): one for one in (BasicTensorAwareStateDict, *state_dicts)}
        self._verifies = verify
        self._options: dict[str, Any] = {"config": config, "allow_pickle": allow_pickle}
        self._is_resuming = True
        self._damaged: set[str] = set()
        self._failure: Exception | None = None
        self._tries: Counter[int] = Counter()  # saves whose failure has not been cleared, by number
        self._lock = threading.RLock()  # NVRx removes in a thread

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a saving process, without process groups and locks."""
        state = {**vars(self), "_rank": self.rank}
        return {**state, "repl_strategy": None, "_failure": None, "_lock": None}

    @property
    def local_ckpt_dir(self) -> Path:
        """The directory of this rank's checkpoints, and of the replicas that it holds."""
        return Path(self._root, self.session_id, str(self.rank))

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save as NVRx does; call it on every rank.

        Raises:
            CheckpointingException: a rank could not save, on all ranks; or all ranks have this
                iteration or a newer one already. With ``is_async``, finalizing the request raises
                the first.
        """
        newest = self.find_latest()
        if newest >= iteration:
            raise CheckpointingException(
                f"cannot save iteration {iteration}: all ranks have iteration {newest} already. "
                "Resume from it, or use another session_id"
            )
        self._is_resuming = False
        self._failure = None
        with self._lock:
            self._tries[iteration] += 1
            # Remove leftovers of a save that some ranks did not complete: they must not count as
            # the new one.
            self._remove(lambda found: found == iteration)
        try:
            return super().save(state_dict, iteration, is_async)
        except CheckpointingException as error:
            raise error from self._failure

    def load(self) -> tuple[TensorAwareStateDict, CkptID]:
        """Load the checkpoint that `find_latest` has found; call it on every rank.

        Raises:
            CheckpointingException: a rank could not load, on all ranks.
        """
        loaded: Any = None
        failure: Exception | None = None
        try:
            loaded = super().load()
        except Exception as error:
            failure = error
        try:
            team_of().agree(failure)
        except Error as error:
            raise CheckpointingException(str(error)) from error
        return loaded[0], loaded[1]

    def _save_fn(self, id_to_state_dict: dict[CkptID, TensorAwareStateDict]) -> None:
        # After a failure this rank must still reach NVRx's next barrier, and the saving process
        # must not end: the other ranks would wait forever. They find that the checkpoint is missing
        # instead.
        try:
            super()._save_fn(id_to_state_dict)  # logs it
        except Exception as error:
            self._failure = error

    def _my_ckpt_ids(self) -> list[CkptID]:
        if self._is_resuming and (stock := sorted(self.local_ckpt_dir.glob("iter_*_local.pt"))):
            _log.warning("not read, since NVRx's own manager has saved them: %s", stock)
        found = self._found()
        if self._is_resuming and self._verifies:
            self._damaged = {path for _, path in found if not self._is_intact(path)}
        return [id_ for id_, path in found if path not in self._damaged]

    def _is_intact(self, path: str) -> bool:
        """Return whether all bytes match their checksums; log damage."""
        try:
            report = verify(path, config=self._options["config"])
        except (Error, OSError) as error:
            _log.error("%s counts as missing: %s", path, error)
            return False
        if not report.ok:
            _log.error("%s counts as missing, since it is damaged: %s", path, report)
        return report.ok

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        path = self._path(ckpt_id)
        try:
            saved = load(path, **self._options)
        except (Error, OSError) as error:
            raise CheckpointingException(f"{path} cannot be loaded: {error}") from error
        if "hollow" in saved:
            whole: TensorAwareStateDict = saved["hollow"]
            whole.insert_tensors(saved["tensors"])
            return whole
        kind = self._classes.get(saved["class"])
        if kind is None:
            raise CheckpointingException(
                f"{path} has a {saved['class']}: give LocalCheckpointManager(state_dicts=[...]) "
                "this class"
            )
        made: TensorAwareStateDict = kind.__new__(kind)
        vars(made).update(saved["attributes"])
        return made

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        path, name = self._path(ckpt_id), _name_of(type(state_dict))
        if os.path.lexists(os.path.join(path, "manifest.json")):
            raise SameMachineReplicationException(ckpt_id)
        try:
            if name in self._classes:
                packed = {"class": name, "attributes": vars(state_dict)}
                save(packed, path, step=ckpt_id[0], **self._options)
            elif self._options["allow_pickle"]:
                self._save_hollow(state_dict, path, ckpt_id[0])
            else:
                raise InvalidStateError(
                    f"a {name} can only be pickled. Give LocalCheckpointManager its class "
                    "(state_dicts=[...]), if ringstow can save all its attributes, or "
                    "allow_pickle=True, which can run any code at a load"
                )
        except BusyError as error:
            raise SameMachineReplicationException(ckpt_id) from error

    def _save_hollow(self, state_dict: TensorAwareStateDict, path: str, iteration: int) -> None:
        """Save tensors, and pickle the rest."""
        tensors = list(state_dict.pop_tensors())
        try:
            save({"hollow": state_dict, "tensors": tensors}, path, step=iteration, **self._options)
        finally:
            state_dict.insert_tensors(tensors)

    def _cleanup(self, iteration: int) -> None:
        with self._lock:
            self._remove(lambda found: found < iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        with self._lock:
            self._tries[iteration] -= 1
            if self._tries[iteration] == 0:  # otherwise a new save of it has begun, and cleared it
                self._remove(lambda found: found == iteration)

    def _remove(self, is_old: Callable[[int], bool]) -> None:
        """Remove complete checkpoints by their iteration, and leftovers of killed saves."""
        config, where = self._options["config"], str(self.local_ckpt_dir)
        try:
            for (iteration, _, _), path in self._found():
                if is_old(iteration):
                    remove(path, config=config)
                    self._damaged.discard(path)
            if os.path.isdir(where):
                prune(where, config=config)
        except (Error, OSError) as error:
            _log.error("old checkpoints in %s stay: %s", where, error)

    def _found(self) -> list[tuple[CkptID, str]]:
        """Return the complete checkpoints in this rank's directory, and their paths."""
        try:
            found = steps(self.local_ckpt_dir, config=self._options["config"])
        except FileNotFoundError:
            return []
        except (Error, OSError) as error:  # all ranks wait for this rank's answer
            _log.error("%s counts as empty: %s", self.local_ckpt_dir, error)
            return []
        complete = [one.path for one in found if one.status == "committed"]
        names = [(_NAME.fullmatch(os.path.basename(path)), path) for path in complete]
        return [((int(n[1]), int(n[2]), self.session_id), path) for n, path in names if n]

    def _path(self, ckpt_id: CkptID) -> str:
        iteration, rank, _ = ckpt_id
        return str(self.local_ckpt_dir / f"iter_{iteration:07}_{rank}_local")


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
