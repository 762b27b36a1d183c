"""Hugging Face's Trainer with ringstow's saves: ``RingstowTrainer`` in place of ``Trainer``.

Needs the packages ``transformers`` and ``accelerate``. docs/trainers/transformers.md says what it
gains and what it does not support.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, sort_checkpoints

from ringstow._config import Config
from ringstow._errors import Error, UnsupportedError
from ringstow._guard import Staging
from ringstow._save import save_async
from ringstow.integrations import _named, _saves
from ringstow.integrations._transformers import _weights

__all__ = ["RingstowTrainer", "RingstowTrainerMixin"]

_log = logging.getLogger("ringstow")
if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

# The names of its checkpoints.
_NAMES = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-.*")

# The Trainer has no public seam for saves. These are its methods that the mixin replaces or calls.
_SEAM = (
    "_get_output_dir",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_save_checkpoint",
    "_save_rng_state",
    "_save_scaler",
    "store_flos",
)


class RingstowTrainerMixin(_Base):
    """Makes a subclass of ``Trainer`` save by ringstow.

    ::

        class MyTrainer(RingstowTrainerMixin, Seq2SeqTrainer):
            pass

    A save returns while it runs, and the next optimizer step waits until it has copied all tensors.
    ``checkpoint-N`` appears when it is complete. The next save, or the end of ``train``, raises the
    failure of a save.

    Raises:
        UnsupportedError: by ``train``, for FSDP, DeepSpeed, PEFT, XLA, ``push_to_hub`` and
            ``enable_jit_checkpoint``; by the class, for a ``transformers`` whose Trainer saves in
            another way.
    """

    ringstow_background: ClassVar[bool] = True
    """Return from a save while it runs; False returns once ``checkpoint-N`` is complete."""
    ringstow_config: ClassVar[Config | None] = None
    """ringstow's settings; None means the defaults."""
    ringstow_staging: ClassVar[Staging] = "guard"
    """How a background save keeps the values of the call: as in `ringstow.save_async`."""

    __saves: _saves.Saves | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        others = [base for base in cls.__mro__ if base is not RingstowTrainerMixin]
        if gone := [name for name in _SEAM if not any(name in vars(base) for base in others)]:
            raise UnsupportedError(
                f"transformers {transformers.__version__} saves in another way: its Trainer has no "
                f"{', '.join(gone)}. docs/trainers/transformers.md has the versions that work"
            )

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does, and return once the last save is complete.

        Raises:
            Exception: what the last save failed of.
        """
        self.__refuse_unsupported()
        self.__agree(self.__attempt(lambda: _named.recover(self.args.output_dir, _NAMES)))
        try:
            result = super().train(*args, **options)
        except BaseException:
            if error := self.__ended():
                _log.error("the last save failed, too: %s", error)
            raise
        self.__agree(self.__ended())
        return result

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.__refuse_unsupported()
        self.__agree(self.__ended())
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = self._get_output_dir(trial=trial)
        final = os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.__note_best(run)
        part = _named.hidden(final)
        self.__agree(self.__attempt(lambda: _named.prepare(final, _NAMES)))
        self.__agree(self.__attempt(lambda: self.__write_files(part), everywhere=True))
        self.__agree(self.__attempt(lambda: self.__start(part, final)))
        if not self.ringstow_background:
            self.__agree(self.__ended())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _weights.is_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self.__refuse_unsupported()
        self.__load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.__agree(self.__ended())
        best = self.state.best_model_checkpoint
        if best is None or not _weights.is_ours(best):
            super()._load_best_model()
            return
        _log.info("loading the best model from %s (%s)", best, self.state.best_metric)
        self.__load_weights(self.model, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _weights.is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved = _weights.load_trainer(checkpoint, self.ringstow_config)
        if saved is None:
            _log.warning(
                "%s was saved with save_only_model=True: the optimizer starts anew", checkpoint
            )
            return
        self.optimizer.load_state_dict(saved["optimizer"])
        self.lr_scheduler.load_state_dict(saved["scheduler"])

    def __start(self, part: str, final: str) -> None:
        """Start the save of all tensors."""
        _saves.refuse_stripes(self.ringstow_config, ", and from_pretrained opens one directory")
        state = dict(self.__unwrapped(self.model).state_dict())
        apart = []
        if not self.args.save_only_model:
            apart = [_weights.TRAINER]
            state[_weights.TRAINER] = {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.lr_scheduler.state_dict(),
            }
        handle = save_async(
            state,
            part,
            step=self.state.global_step,
            apart=apart,
            config=self.ringstow_config,
            staging=self.ringstow_staging,
        )
        if self.__saves is None:
            self.__saves = _saves.Saves("transformers", "save_total_limit")
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        self.__saves.start(
            handle,
            part,
            final,
            seal=lambda: _weights.write_index(part),
            stale=lambda: _stale(final, limit, best),
        )

    def __write_files(self, part: str) -> None:
        """Write all small files; each rank writes the state of its random numbers."""
        if not self.args.save_only_model:
            self._save_scaler(part)
            self._save_rng_state(part)
        if not self.args.should_save:
            return
        model = self.__unwrapped(self.model)
        if isinstance(model, transformers.PreTrainedModel):
            model.save_pretrained(part, state_dict={})  # its configuration; the weights come later
        collator = getattr(self.data_collator, "tokenizer", None)
        if (processor := self.processing_class or collator) is not None:
            processor.save_pretrained(part)
        torch.save(self.args, os.path.join(part, "training_args.bin"))
        self.__note_callbacks()
        self.state.save_to_json(os.path.join(part, "trainer_state.json"))

    def __note_callbacks(self) -> None:
        """Note the callbacks' state in the Trainer's, as the Trainer does before it saves that."""
        from transformers.trainer_callback import ExportableState

        noted = self.state.stateful_callbacks
        for one in [*self.callback_handler.callbacks, self.control]:
            if not isinstance(one, ExportableState):
                continue
            name = type(one).__name__
            if isinstance(noted[name], list):
                noted[name].append(one.state())
            else:
                noted[name] = one.state()

    def __note_best(self, run: str) -> None:
        """Note where the best checkpoint is; it may be the one that is about to be saved."""
        chosen = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        step = self.state.best_global_step
        if self.args.save_strategy in chosen and step:
            best = os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{step}")
            if step == self.state.global_step or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def __load_weights(self, model: Any, path: str) -> None:
        module = self.__unwrapped(model)
        state = module.state_dict()
        _weights.load_weights(state, path, self.ringstow_config)
        # The tensors are the model's own, and filled. What modules hand out besides them is new.
        extra = {name: value for name, value in state.items() if not torch.is_tensor(value)}
        if extra:
            module.load_state_dict(extra, strict=False)

    def __unwrapped(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def __refuse_unsupported(self) -> None:
        remedies = {
            "FSDP": (self.is_fsdp_enabled, "use Trainer"),
            "DeepSpeed": (self.is_deepspeed_enabled, "use Trainer"),
            "PEFT": (hasattr(self.model, "peft_config"), "use Trainer"),
            "XLA": (self.args.device.type == "xla", "use Trainer"),
            "push_to_hub=True": (
                self.args.push_to_hub,
                "its uploads run while the next checkpoint is written. Call trainer.push_to_hub() "
                "after train()",
            ),
            "enable_jit_checkpoint=True": (
                getattr(self.args, "enable_jit_checkpoint", False),
                "it makes an empty checkpoint-N first. Save more often",
            ),
        }
        used = [f"{name}: {remedy}" for name, (is_used, remedy) in remedies.items() if is_used]
        if used:
            raise UnsupportedError(f"RingstowTrainer does not go with {'; nor with '.join(used)}")

    def __attempt(
        self, call: Callable[[], object], *, everywhere: bool = False
    ) -> BaseException | None:
        """Call on the ranks that save, or everywhere; return what it failed of."""
        if everywhere or self.args.should_save:
            try:
                call()
            except Exception as error:
                return error
        return None

    def __ended(self) -> BaseException | None:
        """Wait for the save in flight; return what it failed of."""
        return None if self.__saves is None else self.__saves.end()

    def __agree(self, error: BaseException | None) -> None:
        """Wait for all ranks, and raise if one failed."""
        if self.args.world_size > 1:
            texts: list[Any] = [None] * self.args.world_size
            dist.all_gather_object(texts, error and f"{type(error).__name__}: {error}")
            failed = [(rank, text) for rank, text in enumerate(texts) if text]
            if failed and error is None:
                raise Error(f"rank {failed[0][0]} could not save: {failed[0][1]}")
        if error is not None:
            raise error


class RingstowTrainer(RingstowTrainerMixin, transformers.Trainer):
    """Hugging Face's ``Trainer`` that saves by ringstow; see `RingstowTrainerMixin`."""


def _stale(newest: str, limit: int | None, best: str | None) -> list[str]:
    """Return the checkpoints to remove: those over the limit, by the Trainer's rules."""
    if limit is None or limit <= 0:
        return []
    found = sort_checkpoints(os.path.dirname(newest), use_mtime=True)
    stay = {os.path.abspath(path) for path in (newest, best) if path is not None}
    others = [path for path in found if os.path.abspath(path) not in stay]
    return others[: max(0, len(found) - max(limit, len(stay)))]
