"""The contexts of transformer_engine's tensors, as its ``__tensor_flatten__`` returns them.

Such a context has the class, and a quantizer: an object that may have tensors and a process group.
Neither is saved. The class is known by its name. A tensor that a load makes has no quantizer, and
transformer_engine then makes its default; one that a load fills keeps its own.
"""

from __future__ import annotations

from typing import Any

_KWARGS = "nontensor_kwargs"
_QUANTIZER = "quantizer"
_OUTER = ("cls", "requires_grad")  # what ringstow knows of every wrapper


def is_of(name: str) -> bool:
    """Return whether a type's name, ``"module:Name"``, is one of transformer_engine's."""
    return name.partition(":")[0].partition(".")[0] == "transformer_engine"


def plain(context: Any) -> Any:
    """Return a context without its objects; of another layout, the context itself."""
    if not _has_layout(context, "cls"):
        return context
    kept = {key: value for key, value in context.items() if key not in _OUTER}
    values = {key: value for key, value in context[_KWARGS].items() if key != _QUANTIZER}
    return {**kept, _KWARGS: values}


def whole(context: Any, kind: type) -> Any:
    """Return the context of a type that `plain` has made plain."""
    if not _has_layout(context, _KWARGS):
        return context
    made = {"cls": kind, "requires_grad": False}
    return {**context, **made, _KWARGS: {**context[_KWARGS], _QUANTIZER: None}}


def _has_layout(context: Any, key: str) -> bool:
    return isinstance(context, dict) and key in context and isinstance(context.get(_KWARGS), dict)
