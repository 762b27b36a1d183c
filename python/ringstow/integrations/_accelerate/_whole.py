"""One process, or ranks that each have a copy of the model (DDP): rank 0 saves, all load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringstow._reading._load import load
from ringstow._saving._save import save_async
from ringstow._state.objects import _quantized_layers
from ringstow.integrations._accelerate._states import ACCELERATOR, key

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._saving._guard import Staging
    from ringstow._saving._save_future import SaveHandle


def weights(accelerator: Any) -> list[dict[str, Any]]:
    """Return the models' states, with their names without wrappers."""
    return [_bare(accelerator, model).state_dict() for model in accelerator._models]


def optimizers(accelerator: Any) -> dict[str, Any]:
    """Return the optimizers' states by name."""
    found = enumerate(accelerator._optimizers)
    return {key("optimizer", number): one.state_dict() for number, one in found}


def start(
    models: list[dict[str, Any]],
    optimizers: dict[str, Any],
    meta: dict[str, Any],
    part: str,
    *,
    step: int | None,
    config: Config | None,
    staging: Staging,
    allow_pickle: bool,
) -> SaveHandle:
    """Start to save, on rank 0."""
    states = {key("model", n): one for n, one in enumerate(models)}
    return save_async(
        {**states, **optimizers, ACCELERATOR: meta},
        part,
        step=step,
        droppable=list(optimizers),
        config=config,
        allow_pickle=allow_pickle,
        staging=staging,
    )


def load_into(
    accelerator: Any,
    models: list[Any],
    path: str,
    *,
    strict: bool,
    config: Config | None,
    allow_pickle: bool,
) -> dict[str, Any]:
    """Load models and optimizers; return the rest.

    Everything is read, and its bytes are checked, before anything changes. A model with other
    shapes may be half loaded when torch raises, as with the stock Accelerator.

    Raises:
        KeyMismatchError: ``ringstow slim`` has dropped a part.
        CorruptCheckpointError: bytes on disk are damaged.
        RuntimeError: torch's error, if the model has other names or shapes.
    """

    def part(name: str) -> Any:
        return load(path, prefix=name, config=config, allow_pickle=allow_pickle)[name]

    meta: dict[str, Any] = part(ACCELERATOR)
    states = [part(key("model", n)) for n in range(len(models))]
    optimizers = [part(key("optimizer", n)) for n in range(len(accelerator._optimizers))]
    for model, state in zip(models, states, strict=True):
        bare = _bare(accelerator, model)
        with _quantized_layers.loading(bare):
            bare.load_state_dict(state, strict=strict)
    for optimizer, state in zip(accelerator._optimizers, optimizers, strict=True):
        optimizer.load_state_dict(state)
    return meta


def _bare(accelerator: Any, model: Any) -> Any:
    return accelerator.unwrap_model(model, keep_torch_compile=False)
