"""Refusals of a save, and what to save instead: one line per value, all values in one error."""

from __future__ import annotations

from typing import Any

from ringstow._core._errors import Error, InvalidStateError, UnsupportedError

_SHOWN_MAX = 20
_PARTS = "what it is made of: numbers, text, lists, dicts, tensors, arrays"


class Refused(Exception):
    """A value can't be saved such that it loads equal.

    ``remedy`` is what to save instead, if possible in Python, with ``x`` for the value; ``reason``
    completes "is a Foo, ", if the type alone does not say why.
    """

    def __init__(self, remedy: str, reason: str = "") -> None:
        super().__init__(remedy, reason)
        self.remedy = remedy
        self.reason = reason


_PICKLE = (
    "allow_pickle=True pickles such a value if it holds no tensor, for those who trust the file "
    "when they load it"
)


class Refusals:
    """Collects every value that a save refuses; true if there is any."""

    def __init__(self, pickle: str = _PICKLE) -> None:
        """Begin empty; ``pickle`` is the error's sentence about pickling."""
        self._pickle = pickle
        self._lines: list[str] = []
        self._count = 0
        self._are_unsupported = True
        self._is_pickle_offered = False

    def __bool__(self) -> bool:
        return self._count > 0

    def __len__(self) -> int:
        return self._count

    def add(self, error: Error) -> None:
        """Add an error that names its key and says what to do."""
        self._note(str(error))
        self._are_unsupported &= type(error) is UnsupportedError

    def add_value(self, key: str, value: object, refused: Refused, *, pickled: bool) -> None:
        """Add a value; ``pickled`` means that pickle was allowed, but failed too."""
        reason = refused.reason or "which can't be saved as it is"
        self._note(f"{key} is {kind_of(value)}, {reason}: save {refused.remedy}")
        self._are_unsupported = False
        self._is_pickle_offered |= not pickled

    def check(self) -> None:
        """Raise one error for all collected values.

        Raises:
            InvalidStateError: there are values that can't be saved.
            UnsupportedError: all of these values are tensors that can't be saved yet.
        """
        if not self._count:
            return
        text = self._lines[0]
        if self._count > 1:
            lines = "".join(f"\n  {line}" for line in self._lines)
            more = self._count - len(self._lines)
            text = f"{self._count} values can't be saved:{lines}"
            text += f"\n  and {more} more" if more else ""
        if self._is_pickle_offered:
            text += ("\n" if self._count > 1 else "; ") + self._pickle
        raise (UnsupportedError if self._are_unsupported else InvalidStateError)(text)

    def _note(self, line: str) -> None:
        self._count += 1
        if self._count <= _SHOWN_MAX:
            self._lines.append(line)


def kind_of(value: object) -> str:
    """Return the type of a value with its article: ``an argparse.Namespace``."""
    name = type_name(value)
    dtype = getattr(value, "dtype", None) if name.partition(".")[0] == "numpy" else None
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{article} {name}" + (f" of dtype {dtype}" if dtype is not None else "")


def type_name(value: object) -> str:
    """Return the full name of the value's type, without ``builtins``."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else kind.__module__ + "."
    return module + kind.__qualname__


def remedy(value: Any) -> str:
    """Return what to save instead of a value, if possible in Python, with ``x`` for the value."""
    kind = type(value)
    named = _of_names(kind)
    if named is None:
        named = next((text for name, text in _METHODS if hasattr(kind, name)), None)
    if named is None and kind.__module__.partition(".")[0] == "numpy":
        named = _of_numpy(value)
    if named is None:
        named = next((f"{base.__name__}(x)" for base in _BASES if isinstance(value, base)), None)
    if named is None:
        named = "vars(x)" if getattr(value, "__dict__", None) else _PARTS
    return named


def _of_names(kind: type) -> str | None:
    for base in kind.__mro__:
        found = _TYPES.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    return None


def _of_numpy(value: Any) -> str | None:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return None
    if hasattr(value, "mask"):
        return "x.data and x.mask"
    is_array = hasattr(value, "shape") and type(value).__name__.endswith(("array", "matrix"))
    if dtype.names:
        return "{name: x[name] for name in x.dtype.names}"
    if dtype.kind in "mM":
        return f"x.{'view' if is_array else 'astype'}('i8'), and str(x.dtype)"
    if dtype.kind in "fc":
        return f"x.astype('{dtype.kind}{8 if dtype.kind == 'f' else 16}')"
    if dtype.kind in "OSUV":
        return "x.tolist()"
    return "numpy.asarray(x)"


# By the name of the type, or of a type that it derives from.
_TYPES = {
    "torch._C.Generator": "x.get_state()",
    "torch.storage.UntypedStorage": "the tensor over it",
    "torch.utils.data.dataloader.DataLoader": (
        "a loader that has a state_dict, such as torchdata's StatefulDataLoader, or the number of "
        "batches that it has given"
    ),
    "torch.utils.data.sampler.Sampler": "the number of the epoch and its generator's state",
    "torch.storage.TypedStorage": "the tensor over it",
    "numpy.random._generator.Generator": "x.bit_generator.state",
    "numpy.random.bit_generator.BitGenerator": "x.state",
    "numpy.random.mtrand.RandomState": "x.get_state()",
    "numpy.memmap": "numpy.asarray(x)",
    "random.Random": "x.getstate()",
    "omegaconf.basecontainer.BaseContainer": "OmegaConf.to_container(x)",
    "pandas.core.frame.DataFrame": "{name: x[name].to_numpy() for name in x}",
    "pandas.core.series.Series": "x.to_numpy()",
    "_io.StringIO": "x.getvalue()",
    "_io._IOBase": "its name or what it holds",
    "re.Pattern": "x.pattern",
    "array.array": "x.tolist()",
    "builtins.memoryview": "bytes(x)",
    "builtins.function": "its name, a str",
    "builtins.method": "its name, a str",
    "builtins.builtin_function_or_method": "its name, a str",
    "builtins.type": "its name, a str",
    "builtins.module": "its name, a str",
    "builtins.generator": "list(x)",
    "builtins.mappingproxy": "dict(x)",
    "builtins.BaseException": "str(x)",
    "functools.partial": "x.args and x.keywords, and the name of x.func",
    "enum.Enum": "x.value",
    "datetime.tzinfo": "str(x)",
    "ipaddress._BaseAddress": "str(x)",
}
# By a method or an attribute of the type.
_METHODS = (
    ("state_dict", "x.state_dict()"),
    ("__dataclass_fields__", "dataclasses.asdict(x)"),
    ("__attrs_attrs__", "attrs.asdict(x)"),
    ("model_dump", "x.model_dump()"),
    ("to_dict", "x.to_dict()"),
    ("_asdict", "x._asdict()"),
    ("__next__", "list(x)"),
)
# Base types of a type, to which its values can be converted.
_BASES = (dict, list, tuple, set, frozenset, str, int, float, complex, bytes, bytearray)
