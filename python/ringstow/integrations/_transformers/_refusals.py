"""Refusals of `RingstowTrainerMixin`: classes whose save methods it would skip, and runs.

Each refusal comes before the first step, and says what to do instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import transformers
from torch.distributed.tensor import DTensor
from transformers.utils import is_sagemaker_mp_enabled

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._kit._framework_check import Seam
from ringstow.integrations._kit._refusals import refuse, refuse_places
from ringstow.integrations._transformers import _adapters

# The Trainer has no public interface for saves: the mixin replaces or calls these methods.
METHODS = (
    "_finalize_training",
    "_get_output_dir",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save_checkpoint",
    "_save_rng_state",
    "_save_scaler",
    "store_flos",
)
SEAM = Seam("transformers", "5.23", "huggingface")
SEAM.check()
# A save of the stock Trainer calls these methods, but the mixin's does not.
_UNUSED = ("save_model", "_save", "_save_optimizer_and_scheduler")
# Transformers' own callbacks whose on_save does not use the checkpoint, by their setting.
_IDLE: dict[str, Callable[[Any], bool]] = {
    "ClearMLCallback": lambda one: not one._log_model,
    "DVCLiveCallback": lambda one: one._log_model != "all",
    "FlyteCallback": lambda one: not one.sync_checkpoints,
    "MLflowCallback": lambda one: not one._log_artifacts,
    "NeptuneCallback": lambda one: not one._should_upload_checkpoint,
    "SwanLabCallback": lambda one: True,
    "TrackioCallback": lambda one: True,
    "WandbCallback": lambda one: one._log_model != "checkpoint",
}
# The mixin's own methods come first, and may not call the next class.
_REPLACED = (
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save_checkpoint",
)


def check_class(cls: type, mixin: type) -> None:
    """Refuse a class that the mixin does not support.

    Raises:
        UnsupportedError: its Trainer saves in another way, or a class of the caller's has a method
            that would not be called.
    """
    others = [base for base in cls.__mro__ if base is not mixin]
    gone = [name for name in METHODS if not any(name in vars(base) for base in others)]
    SEAM.refuse(f"its Trainer has no {name}" for name in gone)
    place = cls.__mro__.index(mixin)
    before, after = cls.__mro__[:place], cls.__mro__[place + 1 :]
    for name in _UNUSED:
        if found := _definer((*before, *after), name):
            raise UnsupportedError(
                f"{found}.{name} would not be called: ringstow saves model.state_dict(). Write "
                "what it adds in on_checkpoint_complete(path), and give the method another name"
            )
    for name in _REPLACED:
        found = _definer(after, name)
        if found and not _definer(before, name):
            raise UnsupportedError(
                f"{found}.{name} would not be called: the mixin's comes first. Define {name} in "
                f"{cls.__name__}, do there what {found}'s adds, and call super().{name}"
            )


def refuse_run(trainer: Any) -> None:
    """Refuse a Trainer's setup that the mixin cannot save.

    Raises:
        InvalidStateError: the settings stripe checkpoints.
        UnsupportedError: names each, with what to do instead.
    """
    refuse_places(
        trainer.ringstow_config,
        "they get their name by a rename, and from_pretrained opens one directory",
    )
    args = trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    is_peft = hasattr(model, "peft_config")
    is_fsdp = trainer.is_fsdp_enabled
    remedies = {
        "FSDP1": (
            is_fsdp and not trainer.accelerator.is_fsdp2,
            'use fsdp_config={"version": 2}',
        ),
        "FSDP and PEFT together": (is_fsdp and is_peft, "use Trainer"),
        "FSDP and save_on_each_node=True": (
            is_fsdp and args.save_on_each_node,
            "all ranks write to one directory: leave save_on_each_node out",
        ),
        "weights that are sharded without FSDP": (
            not is_fsdp and any(isinstance(one, DTensor) for one in model.parameters()),
            "use the argument fsdp, or Trainer",
        ),
        "DeepSpeed": (trainer.is_deepspeed_enabled, "use Trainer"),
        "SageMaker's model parallelism": (is_sagemaker_mp_enabled(), "use Trainer"),
        "adapters outside of a PeftModel": (
            is_peft and not _adapters.is_peft_model(model),
            "make the model by peft.get_peft_model",
        ),
        "XLA": (args.device.type == "xla", "use Trainer"),
        "push_to_hub=True": (
            args.push_to_hub,
            "its uploads run while the next checkpoint is written. Upload in "
            "on_checkpoint_complete(path), or call trainer.push_to_hub() after train()",
        ),
    }
    refuse("RingstowTrainer", remedies)


def refuse_resume(path: object) -> None:
    """Refuse to resume from a directory that `_rename_when_complete.recover` would remove.

    Raises:
        InvalidStateError: the path belongs to a killed save.
    """
    if isinstance(path, str | os.PathLike):
        name = os.path.basename(os.path.normpath(path))
        if _rename_when_complete.is_hidden(name):
            raise InvalidStateError(
                f"{path} is a save that was killed before its last step, or an older checkpoint "
                "that is being replaced. resume_from_checkpoint=True finds the newest checkpoint "
                "that is complete"
            )


def writes_beside_steps(trainer: Any) -> bool:
    """Return whether the optimizer changes weights outside of a torch optimizer's ``step``."""
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    return name in ("lomo", "adalomo") or name.startswith("schedule_free")


def early_readers(trainer: Any, mixin: type) -> list[str]:
    """Return the methods that may use ``checkpoint-N`` directly after a save returns."""
    callbacks = trainer.callback_handler.callbacks
    found = [f"{type(one).__name__}.on_save" for one in callbacks if _may_read(one)]
    classes = type(trainer).__mro__
    own = _definer(classes[: classes.index(mixin)], "_save_checkpoint")
    return found if own is None else [*found, f"{own}._save_checkpoint"]


def _may_read(callback: Any) -> bool:
    """Return whether a callback's ``on_save`` may use the checkpoint."""
    kind = next((one for one in type(callback).__mro__ if "on_save" in vars(one)), None)
    if kind is None or kind is transformers.TrainerCallback:
        return False
    is_idle = _IDLE.get(kind.__name__) if kind.__module__.startswith("transformers.") else None
    try:
        return is_idle is None or not is_idle(callback)
    except AttributeError:  # another version of transformers, with another name for the setting
        return True


def _definer(classes: tuple[type, ...], name: str) -> str | None:
    """Return the first class outside Transformers that has a method; or None."""
    for one in classes:
        if name in vars(one):
            return None if one.__module__.startswith("transformers.") else one.__name__
    return None
