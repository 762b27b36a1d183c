"""Hugging Face's Trainer with ringstow's saves: ``RingstowTrainer`` in place of ``Trainer``.

Needs the packages ``transformers`` and ``accelerate``. See docs/trainers/huggingface.md for
benefits and limits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ringstow._core import _files
from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError
from ringstow._saving._guard import Staging
from ringstow._saving._save import save_async
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._kit import ranks_or_alone
from ringstow.integrations._kit._in_flight import InFlight, Publication
from ringstow.integrations._servers._pretrained import from_pretrained
from ringstow.integrations._transformers import (
    _adapters,
    _refusals,
    _removals,
    _shards,
    _stops,
    _weights,
)

__all__ = ["RingstowTrainer", "RingstowTrainerMixin", "from_pretrained"]

_log = logging.getLogger("ringstow")
if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from ringstow._core._when import When
    from ringstow._ranks._team import Team
    from ringstow._saving._save_future import SaveHandle
    from ringstow.integrations._kit._ranks import Ranks
else:
    _Base = object

# The names of the Trainer's checkpoints.
_NAMES = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-.*")


class RingstowTrainerMixin(_Base):
    """Makes a subclass of ``Trainer`` save by ringstow.

    ::

        class MyTrainer(RingstowTrainerMixin, Seq2SeqTrainer):
            pass

    A save returns while it runs, and the next optimizer step waits until it has copied all tensors.
    ``checkpoint-N`` appears when it is complete. The next save, or the end of ``train``, raises the
    failure of a save.

    Raises:
        UnsupportedError: ``train`` raises it for setups that docs/trainers/huggingface.md lists,
            such as DeepSpeed; the class raises it for your methods that would not be called, and
            for a version of ``transformers`` whose Trainer saves in another way.
    """

    ringstow_background: ClassVar[bool | None] = None
    """Return from a save while it runs; False returns once ``checkpoint-N`` is complete. None
    means True, unless a callback has ``on_save`` or a subclass ``_save_checkpoint``: these may use
    the checkpoint."""
    ringstow_config: ClassVar[Config | None] = None
    """ringstow's settings; None means the defaults."""
    ringstow_staging: ClassVar[Staging] = "guard"
    """How a background save keeps the values of the call; see `ringstow.save_async`."""

    ringstow_when: ClassVar[When | None] = None
    """When to save besides ``save_strategy``, and at which signal or deadline to stop, such as
    ``OnSignal(signal.SIGTERM, grace="30s")``; see `ringstow.CheckpointManager`. None means SIGTERM
    with ``enable_jit_checkpoint=True``, and otherwise never."""

    __flight: InFlight | None = None
    __stops: _stops.Stops | None = None
    __made: Team | None = None
    __has_said = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _refusals.check_class(cls, RingstowTrainerMixin)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any
    ) -> Any:
        """Train as the Trainer does, and return once the last save is complete.

        Raises:
            Exception: the last save's failure.
        """
        _refusals.refuse_run(self)
        _refusals.refuse_resume(resume_from_checkpoint)
        self.__on_savers(lambda: _rename_when_complete.recover(self.args.output_dir, _NAMES))
        with self.__stopping():
            try:
                result = super().train(resume_from_checkpoint, *args, **options)
            except BaseException:
                if self.__flight is not None and (error := self.__flight.end()):
                    _log.error("the last save failed, too: %s", error)
                raise
            self.__end()
        return result

    @contextlib.contextmanager
    def __stopping(self) -> Iterator[None]:
        """Ask the policy after each step of a training, if there is one."""
        early = _stops.replaced(self)
        when = _stops.policy(self.ringstow_when, self.args)
        if when is None:
            yield
            return
        ranks = self.__ranks()
        stops = self.__stops = _stops.Stops(when, ranks, self.args.output_dir, early)
        self.add_callback(stops)
        try:
            yield
            stops.schedule.settle()
        except BaseException:
            # Ranks may be waiting in a call of their own, for this one.
            ranks.close()
            self.__made = None
            raise
        finally:
            self.remove_callback(stops)
            stops.schedule.close()
            self.__stops = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        _refusals.refuse_run(self)
        self.__end()
        if self.__stops:
            self.__stops.schedule.heed()
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = self._get_output_dir(trial=trial)
        self.__note_best(run)
        # Absolute: the save continues in a thread, and the program may chdir.
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        final = os.path.abspath(os.path.join(run, name))
        part = _rename_when_complete.hidden(final)
        self.__on_savers(lambda: _rename_when_complete.prepare(final, _NAMES))
        with _rename_when_complete.discarding(part, final, removes=self.args.should_save):
            self.__begin(part, final)
        if self.__is_awaited() or (self.__stops and self.__stops.schedule.stopping):
            self.__end()

    def __begin(self, part: str, final: str) -> None:
        """Write the small files, and start the save of everything else."""
        ranks = self.__ranks()
        ranks.each(lambda: self.__write_files(part))
        saves = self.__kind() == "shards" or self.args.should_save
        # In two steps: no rank begins a save that would wait for a failed rank.
        state = ranks.each(lambda: self.__state() if saves else {})
        ranks.each(lambda: self.__start(state, part, final) if saves else None)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        # The Trainer then cleans up and calls callbacks: all checkpoints must have their final
        # names.
        self.__end()
        if not self.args.load_best_model_at_end:
            self.__keep_best_alone()
        return super()._finalize_training(*args, **options)

    def on_checkpoint_complete(self, path: str) -> None:
        """Process a complete checkpoint; override it, or assign a function.

        ringstow calls it for each checkpoint, once it is renamed and durable, and older ones over
        ``save_total_limit`` are removed. It runs in a thread of ringstow, on each rank with
        ``args.should_save``: the first rank. Training continues meanwhile, so do not touch the
        model. The next save waits for it. Its exception ends the run like a failed save, and the
        checkpoint stays.

        Args:
            path: the checkpoint, ``OUTPUT_DIR/checkpoint-N``.
        """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _weights.kind_of(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        _refusals.refuse_run(self)
        self.__load_weights(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.__end()
        best = self.state.best_model_checkpoint
        if best is None or _weights.kind_of(best) is None:
            super()._load_best_model()
        else:
            _log.info("loading the best model from %s (%s)", best, self.state.best_metric)
            self.__load_weights(self.model, best)
        self.__keep_best_alone()

    def __keep_best_alone(self) -> None:
        """Remove all checkpoints but the best at the end, as the Trainer does for a limit of 1."""
        best = self.state.best_model_checkpoint
        if best is not None and self.args.save_total_limit == 1 and os.path.isdir(best):
            self.__on_savers(lambda: _removals.remove_others(best))

    def __is_awaited(self) -> bool:
        """Return whether this save waits until it is complete; equal on all ranks."""
        if self.ringstow_background is not None:
            return not self.ringstow_background
        readers = _refusals.early_readers(self, RingstowTrainerMixin)
        if readers and not self.__has_said:
            self.__has_said = True
            _log.warning(
                "saves do not run in the background, because %s may use the checkpoint. If not, "
                "set ringstow_background = True",
                " and ".join(readers),
            )
        return any(self.__ranks().gathered(bool(readers)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        kind = None if checkpoint is None else _weights.kind_of(checkpoint)
        if checkpoint is None or kind is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if kind == "shards":
            model = self.__unwrapped(self.model)
            scheduler = _shards.load_trainer(self.__of_several(), model, self.optimizer, checkpoint)
        else:
            saved = _weights.load_trainer(checkpoint, self.ringstow_config)
            scheduler = None if saved is None else saved["scheduler"]
            if saved is not None:
                self.optimizer.load_state_dict(saved["optimizer"])
        if scheduler is None:
            _log.warning(
                "%s holds the weights alone, by save_only_model=True or ringstow.slim: the "
                "optimizer and the learning rate start anew",
                checkpoint,
            )
            return
        self.lr_scheduler.load_state_dict(scheduler)

    def __kind(self) -> _weights.Kind:
        """Return the kind of weights in this Trainer's checkpoints."""
        if self.is_fsdp_enabled:
            return "shards"
        is_peft = _adapters.is_peft_model(self.__unwrapped(self.model))
        return "adapters" if is_peft else "a whole model"

    def __state(self) -> dict[str, Any]:
        """Return the state that this rank saves."""
        model = self.__unwrapped(self.model)
        optimizer = None if self.args.save_only_model else self.optimizer
        kind = self.__kind()
        if kind == "shards":
            return _shards.state_of(model, optimizer, self.lr_scheduler)
        is_whole = kind == "a whole model"
        state = dict(model.state_dict()) if is_whole else _adapters.state_of(model)
        if optimizer is not None:
            state[_weights.TRAINER] = {
                "optimizer": optimizer.state_dict(),
                "scheduler": self.lr_scheduler.state_dict(),
            }
        return state

    def __start(self, state: dict[str, Any], part: str, final: str) -> None:
        """Start the save of all tensors and of the optimizer's state."""
        if self.__flight is None:
            self.__flight = InFlight(torn='In a Trainer: ringstow_staging = "wait"')
        kind, config = self.__kind(), self.ringstow_config
        is_sharded = kind == "shards"
        handle: SaveHandle
        if is_sharded:
            apart = [_weights.TRAINER] if _weights.TRAINER in state else []
            handle = self.__of_several().save_async(
                state, part, self.state.global_step, apart=apart
            )
        else:
            handle = self.__save(state, part)
        if self.__stops:
            self.__stops.schedule.follow(handle)
        if not self.args.should_save:
            self.__flight.handle = handle
            return
        seal: dict[_weights.Kind, Callable[[], None]] = {
            "a whole model": lambda: _weights.write_index(part),
            "adapters": lambda: _adapters.write_files(part, config),
            "shards": lambda: None,
        }
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        kept = None if best is None else os.path.abspath(best)
        how = Publication(
            part,
            final,
            seal=seal[kind],
            stale=lambda: _removals.stale(final, limit, kept),
            limit="save_total_limit",
            announce=lambda: self.__announce(final),
        )
        self.__flight.publish(handle, how)

    def __save(self, state: dict[str, Any], part: str) -> SaveHandle:
        try:
            return save_async(
                state,
                part,
                step=self.state.global_step,
                droppable=[_weights.TRAINER] if _weights.TRAINER in state else [],
                config=self.ringstow_config,
                staging=self.__staging(),
            )
        except InvalidStateError as error:
            if "allow_pickle" in str(error):
                error.add_note("A Trainer's saves have no allow_pickle.")
            raise

    def __announce(self, final: str) -> None:
        try:
            self.on_checkpoint_complete(final)
        except BaseException as error:
            error.add_note(f"on_checkpoint_complete raised it. {final} is complete.")
            raise

    def __ranks(self) -> Team:
        """Return the ranks, or this process; a collective call."""
        if self.__made is None:
            # Without shards only saving ranks use the setting, each by itself.
            staging = self.__staging() if self.is_fsdp_enabled else "guard"
            self.__made = ranks_or_alone(self.ringstow_config, staging)
        return self.__made

    def __of_several(self) -> Ranks:
        """Return the ranks of FSDP, which needs a process group even for one rank."""
        return cast("Ranks", self.__ranks())

    def __staging(self) -> Staging:
        is_guarded = self.ringstow_staging == "guard"
        if is_guarded and _refusals.writes_beside_steps(self):
            return "wait"  # nothing would wait for the save
        return self.ringstow_staging

    def __write_files(self, part: str) -> None:
        """Write all small files; each rank writes the state of its random numbers."""
        if not self.args.save_only_model:
            self._save_scaler(part)
            self._save_rng_state(part)
            if self.args.world_size > 1:  # the first rank syncs no other host's files
                _files.sync(os.path.join(part, f"rng_state_{self.args.process_index}.pth"))
        if not self.args.should_save:
            return
        model = self.__unwrapped(self.model)
        if isinstance(model, transformers.PreTrainedModel):
            model.save_pretrained(part, state_dict={})  # only its configuration; weights follow
        elif _adapters.is_peft_model(model):
            _adapters.write_configs(model, part)
        collator = getattr(self.data_collator, "tokenizer", None)
        if (processor := self.processing_class or collator) is not None:
            processor.save_pretrained(part)
        with _files.new(os.path.join(part, "training_args.bin")) as stream:
            torch.save(self.args, stream)
        self.__note_callbacks()
        self.state.save_to_json(os.path.join(part, "trainer_state.json"))

    def __note_callbacks(self) -> None:
        """Copy the callbacks' state into the Trainer's state, as the Trainer does before a save."""
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
        """Store the path of the best checkpoint; it may be the one about to be saved."""
        chosen = (SaveStrategy.STEPS, SaveStrategy.EPOCH, SaveStrategy.BEST)
        step = self.state.best_global_step
        if self.args.save_strategy in chosen and step:
            best = os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{step}")
            if step == self.state.global_step or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def __load_weights(self, model: Any, path: str) -> None:
        held, mine = _weights.kind_of(path), self.__kind()
        if held != mine:
            raise InvalidStateError(
                f"{path} holds {held}, and this Trainer saves and resumes {mine}: use the model "
                "and the argument fsdp of the run that saved it"
            )
        module = self.__unwrapped(model)
        if held == "shards":
            _shards.load_weights(self.__of_several(), module, path)
        elif held == "adapters":
            _adapters.load_adapters(module, path, self.ringstow_config)
        else:
            _weights.load_whole(module, path, self.ringstow_config)

    def __unwrapped(self, model: Any) -> Any:
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def __on_savers(self, call: Callable[[], object]) -> None:
        """Call a function on the saving ranks; raise on all ranks if it raises on one."""
        self.__ranks().each(lambda: call() if self.args.should_save else None)

    def __end(self) -> None:
        """Wait for the save in progress; raise its failure on all ranks."""
        self.__ranks().agree(None if self.__flight is None else self.__flight.end())


class RingstowTrainer(RingstowTrainerMixin, transformers.Trainer):
    """Hugging Face's ``Trainer`` that saves by ringstow; see `RingstowTrainerMixin`."""
