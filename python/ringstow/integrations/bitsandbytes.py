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
    """Let a model's ``state_dict`` return its scales, and its ``load_state_dict`` take them.

    ::

        ringstow.integrations.bitsandbytes.use(model)
        model.load_state_dict(ringstow.load("ckpt")["model"])

    bitsandbytes' ``Linear4bit`` refuses the scales of its own ``state_dict``, and ``Linear8bitLt``
    does so after its first forward pass. Under FSDP2 the ``state_dict`` of a ``Linear4bit`` has its
    codes alone: from this call on it has the scales, too. ringstow's saves and loads of
    ``{"model": model}`` and the managers need no such call; programs that call ``state_dict`` under
    FSDP2, or ``load_state_dict``, do, such as ``dcp.save({"model": model})``, ``dcp.load`` and
    Lightning.

    The scales are filled in place. torch raises its RuntimeError if a weight has codes without
    scales, or scales of another quantization: other shapes, block sizes, types. Such a weight keeps
    its codes and scales; torch has loaded the others then.

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
