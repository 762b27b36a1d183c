"""Models with bitsandbytes' 4-bit and 8-bit layers, such as those of QLoRA: ``use(model)``.

Needs the package ``bitsandbytes``. See docs/values.md.
"""

from __future__ import annotations

from typing import TypeVar

import bitsandbytes.nn
import torch

from ringstow._core._errors import InvalidStateError
from ringstow._state.objects import _quantized_layers

__all__ = ["use"]

_T = TypeVar("_T", bound=torch.nn.Module)

_LAYERS = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)


def use(model: _T) -> _T:
    """Let a model's ``load_state_dict`` take what its ``state_dict`` returns.

    ::

        ringstow.integrations.bitsandbytes.use(model)
        model.load_state_dict(ringstow.load("ckpt")["model"])

    bitsandbytes' ``Linear4bit`` refuses the scales of its own ``state_dict``, and ``Linear8bitLt``
    does so after its first forward pass. ``ringstow.load_into({"model": model}, path)`` and the
    managers need no such call; programs that call ``load_state_dict`` themselves do, such as
    ``dcp.load({"model": model})`` and Lightning.

    The scales are filled in place. torch raises its RuntimeError if they are of another
    quantization: other shapes, block sizes, types.

    Args:
        model: a module; its quantized layers get a hook, which a copy of the model has, too.

    Returns:
        The model.

    Raises:
        InvalidStateError: no layer of the model is one of bitsandbytes'.
    """
    if not any(isinstance(layer, _LAYERS) for layer in model.modules()):
        raise InvalidStateError(
            f"{type(model).__qualname__} has no Linear4bit and no Linear8bitLt: load it without "
            "this call"
        )
    _quantized_layers.let_load(model)
    return model
