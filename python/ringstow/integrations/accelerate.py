"""Hugging Face's Accelerator with ringstow's saves: ``RingstowAccelerator`` for ``Accelerator``.

Needs the package ``accelerate``. See docs/trainers/huggingface.md for benefits and limits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ringstow._core import _when
from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._core._when import When
from ringstow._saving._guard import Staging, check_staging
from ringstow.integrations._accelerate._checkpoints import Checkpoints, Options
from ringstow.integrations._accelerate._limits import full_state_dict, refuse_unsupported
from ringstow.integrations._kit._framework_check import Seam
from ringstow.integrations._kit._refusals import refuse_places

__all__ = ["RingstowAccelerator"]

# The undocumented methods and attributes of the Accelerator that this module uses.
_SEAM = Seam(
    "accelerate",
    "1.15",
    "huggingface",
    calls={
        Accelerator: {
            "save_state": "output_dir safe_serialization save_model_func_kwargs",
            "load_state": "input_dir load_kwargs load_model_func_kwargs",
            "prepare": "args",
            "end_training": "",
            "unwrap_model": "model keep_torch_compile",
        }
    },
)
_ATTRIBUTES = (
    "_custom_objects",
    "_dataloaders",
    "_load_model_state_pre_hook",
    "_models",
    "_optimizers",
    "_save_model_state_pre_hook",
    "_schedulers",
    "is_fsdp2",
    "project_configuration",
    "scaler",
    "step",
)
_SEAM.check()


class RingstowAccelerator(Accelerator):  # type: ignore[misc, unused-ignore]
    """Hugging Face's ``Accelerator`` that saves by ringstow.

    ::

        accelerator = RingstowAccelerator(project_config=configuration)

    ``save_state`` returns while the save runs, and the next optimizer step waits until it has
    copied all tensors. The directory appears when it is complete. The next save,
    `wait_for_checkpoint` or ``end_training`` raises the failure of a save.

    Args:
        args: the Accelerator's own.
        background: return from ``save_state`` while it runs; False returns once the directory is
            complete.
        config: ringstow's settings; None means the defaults.
        staging: how a background save keeps the values of the call: ``"guard"``, ``"snapshot"`` or
            ``"wait"``; see `ringstow.save_async`.
        allow_pickle: pickle values of registered objects that ringstow cannot save by itself, and
            unpickle them, which can run any code.
        when: when `should_save` says to save, and at which signal or deadline to stop; see
            `ringstow.CheckpointManager`. The same on all ranks.
        kwargs: the Accelerator's own.

    Raises:
        InvalidStateError: the settings stripe checkpoints, or ``staging`` is unknown.
        UnsupportedError: this version of ``accelerate`` saves in another way. ``prepare``,
            ``save_state`` and ``load_state`` raise it for DeepSpeed, Megatron-LM, FSDP1, XLA and
            others.
    """

    def __init__(
        self,
        *args: Any,
        background: bool = True,
        config: Config | None = None,
        staging: Staging = "guard",
        allow_pickle: bool = False,
        when: When | None = None,
        **kwargs: Any,
    ) -> None:
        check_staging(staging, is_for_ranks=True)
        when = _when.checked(when)
        refuse_places(config)
        super().__init__(*args, **kwargs)
        gone = [name for name in _ATTRIBUTES if not hasattr(self, name)]
        _SEAM.refuse(f"its Accelerator has no {name}" for name in gone)
        self._ringstow_background = background
        self._ringstow = Checkpoints(self, Options(config, staging, allow_pickle))
        if when is not None:
            self._ringstow.ask(when)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare objects as the Accelerator does.

        Raises:
            UnsupportedError: the objects' states could not be saved.
        """
        refuse_unsupported(self)
        prepared = super().prepare(*args, **kwargs)
        refuse_unsupported(self)
        return prepared

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save everything that ``load_state`` needs; call it on every rank.

        First waits for the previous save. With automatic naming, the oldest checkpoints over
        ``total_limit`` are removed once this one is complete.

        Args:
            output_dir: the checkpoint's directory, which the save replaces as a whole. Leave it out
                with automatic naming, where it only causes a warning.
            safe_serialization: False is refused.
            save_model_func_kwargs: refused; they are for DeepSpeed.

        Returns:
            The checkpoint's directory, which appears when it is complete.

        Raises:
            BaseException: the previous save's failure, on all ranks.
            InvalidStateError: there is no ``output_dir``; it holds more than a checkpoint; or a
                registered object has a value that ringstow cannot save.
            UnsupportedError: an unsupported setup; see ``prepare``.
            ValueError: automatic naming has used this number already.
        """
        refuse_unsupported(self)
        if not safe_serialization:
            raise UnsupportedError(
                "safe_serialization=False is not for RingstowAccelerator, which writes safetensors "
                "files and no pickles: leave it out"
            )
        if save_model_func_kwargs:
            raise TypeError(
                f"RingstowAccelerator has no use for {', '.join(save_model_func_kwargs)} in "
                "save_state: leave them out"
            )
        self.wait_for_checkpoint()
        path = self._ringstow.save(output_dir)
        self.project_configuration.iteration += 1
        if not self._ringstow_background or self.stopping:
            self.wait_for_checkpoint()
        return Path(path)

    def should_save(self, step: int) -> bool:
        """Return whether to call ``save_state`` now, as ``when`` says; the same on all ranks.

        Call it on every rank, once after each step; see `ringstow.CheckpointManager.should_save`.

        Raises:
            TypeError: the step is no integer.
            InvalidStateError: there is no ``when``; or the step is lower than the one before; or
                the ranks ask for different steps.
        """
        if self._ringstow.schedule is None:
            raise InvalidStateError(
                "should_save needs a policy: RingstowAccelerator(when=ringstow.EverySteps(500))"
            )
        return self._ringstow.schedule.asks(step)

    @property
    def stopping(self) -> bool:
        """Whether the training must end: a signal or a deadline of ``when`` was heard.

        `should_save` sets it, on all ranks at the same step. From then on ``save_state`` returns
        once the directory is complete.
        """
        return self._ringstow.schedule is not None and self._ringstow.schedule.is_stopping()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what ``save_state`` saved; call it on every rank.

        Loads the stock Accelerator's checkpoints, too. With automatic naming, the next save gets a
        number above all existing ones.

        Args:
            input_dir: the checkpoint's directory; None means the newest of automatic naming.
            load_kwargs: options for the stock Accelerator's checkpoints.
            load_model_func_kwargs: ``strict=False`` loads the weights whose names are in both;
                ``map_location`` works as in the Accelerator. Other options are only for its own
                checkpoints.

        Raises:
            ValueError: there is no such directory.
            FileNotFoundError: automatic naming has no complete checkpoint.
            InvalidStateError: the checkpoint lacks an object that is prepared or registered here,
                or another kind of run saved it.
            CorruptCheckpointError: bytes on disk are damaged.
        """
        refuse_unsupported(self)
        self.wait_for_checkpoint()
        path, mark = self._ringstow.find(input_dir)
        if mark is None:
            with full_state_dict(self, path):
                super().load_state(path, load_kwargs, **load_model_func_kwargs)
        else:
            self._ringstow.load(path, mark, strict=_strict(load_model_func_kwargs))
        self._ringstow.number_next()

    def latest_checkpoint(self) -> str | None:
        """Return the newest complete checkpoint of automatic naming; None if there is none.

        First waits for the save in progress. Call it on every rank: all get the same result.

        Raises:
            BaseException: the failure of the save in progress.
            InvalidStateError: the Accelerator has no automatic naming.
        """
        self.wait_for_checkpoint()
        return self._ringstow.newest()

    def wait_for_checkpoint(self) -> None:
        """Wait until the save in progress is complete; call it on every rank.

        Raises:
            BaseException: the save's failure, on all ranks; once.
        """
        self._ringstow.wait()

    def end_training(self) -> None:
        """Wait as `wait_for_checkpoint` does, and end the training as the Accelerator does."""
        try:
            self.wait_for_checkpoint()
        finally:
            self._ringstow.close()
            super().end_training()


def _strict(options: dict[str, Any]) -> bool:
    """Return whether all weights must match.

    Raises:
        TypeError: options that only the stock Accelerator's checkpoints support.
    """
    others = options.keys() - {"strict", "map_location"}
    if others:
        raise TypeError(
            f"RingstowAccelerator has no use for {', '.join(sorted(others))} in load_state for a "
            "checkpoint of ringstow's: leave them out"
        )
    if options.get("map_location") not in (None, "cpu", "on_device"):
        raise TypeError(
            "Unsupported optimizer map location passed, please choose one of `None`, `'cpu'`, or "
            "`'on_device'`"
        )
    return bool(options.get("strict", True))
