"""Converts small values of fixed types to constructor arguments, and back.

Pure. These are types of the standard library, numpy and torch that programs keep in their state. A
fixed function here makes each type: nothing in a file chooses the function.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from ringstow._core._errors import UnsupportedError
from ringstow._state.tensors import _numpy
from ringstow._state.tensors._optional_packages import imported, require
from ringstow._state.tree._refusals import Refused

Args = list[Any]
_INT = (int, type(None))


class _Kind(NamedTuple):
    take: Callable[[Any], Args]
    """Returns the arguments; raises `Refused` for a value that they could not restore."""
    types: tuple[tuple[type, ...], ...]
    """The types that each argument may have. ``object`` means another value of this table."""
    make: Callable[..., Any]
    needs: str = ""
    """The package whose module is the first argument of ``make``: torch or numpy."""


def take(value: object) -> tuple[str, Args] | None:
    """Return the name and the arguments of a value; None if its type is not in the table.

    An argument is None, a bool, an int, a float, a str, bytes, or another such value.

    Raises:
        Refused: this value of the type can't be restored from arguments.
    """
    name = _name_of(value)
    return None if name is None else (name, _KINDS[name].take(value))


def needs(name: str) -> str:
    """Return the package without which values of a kind can't be made; empty for most.

    Raises:
        ValueError: the kind is unknown.
    """
    return _kind(name).needs


def check(name: str, args: Args) -> _Kind:
    """Return the kind, if these are valid arguments for it.

    Raises:
        ValueError: the kind is unknown, or these are not its arguments.
    """
    kind = _kind(name)
    if len(args) != len(kind.types) or not all(map(_is_of, args, kind.types)):
        raise ValueError(f"these are no arguments of a value of the kind {name!r}")
    return kind


def make(name: str, args: Args, key: str = "") -> Any:
    """Return the value of a kind that the arguments make.

    Args:
        name: the kind's name.
        args: the arguments that `take` returns.
        key: the value's path, for the message if its package is not installed.

    Raises:
        ValueError: the kind is unknown, or these are not its arguments.
        UnsupportedError: torch or numpy is not installed, or has no such value.
    """
    kind = check(name, args)
    packages = [require(kind.needs, key)] if kind.needs else []
    try:
        return kind.make(*packages, *args)
    except UnsupportedError:
        raise
    except Exception as error:
        raise ValueError(f"a value of the kind {name!r} can't be made: {error}") from None


def _kind(name: str) -> _Kind:
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(f"a value of the kind {name!r} is unknown (written by a newer version?)")
    return kind


def _is_of(value: object, types: tuple[type, ...]) -> bool:
    return object in types or type(value) in types


def _name_of(value: object) -> str | None:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    name = _ALIASES.get(name, name)
    if name in _KINDS:
        module, _, attribute = name.rpartition(".")
        return name if getattr(imported(module), attribute, None) is kind else None
    numpy = imported("numpy")  # each of its dtypes has a class of its own
    return "numpy.dtype" if numpy is not None and isinstance(value, numpy.dtype) else None


# The defining module of types that are known under another module's name.
_ALIASES = {
    "_io.BytesIO": "io.BytesIO",
    "pathlib._local.PosixPath": "pathlib.PosixPath",
    "pathlib._local.PurePosixPath": "pathlib.PurePosixPath",
    "pathlib._local.WindowsPath": "pathlib.WindowsPath",
    "pathlib._local.PureWindowsPath": "pathlib.PureWindowsPath",
    "torch.torch_version.TorchVersion": "torch.torch_version.TorchVersion",
}


def _slice(value: slice) -> Args:
    args = [value.start, value.stop, value.step]
    if not all(type(arg) in _INT for arg in args):
        raise Refused("[x.start, x.stop, x.step]")
    return args


def _bytes_io(value: Any) -> Args:
    if value.closed:
        raise Refused("what it held, before it is closed")
    return [value.getvalue(), value.tell()]


def _make_bytes_io(data: bytes, position: int) -> Any:
    import io

    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


def _path(value: Any) -> Args:
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused("os.fsencode(x)", "which is not valid Unicode") from None
    return [text]


def _zoned(value: Any) -> Args:
    return [value.replace(tzinfo=None).isoformat(), _zone(value.tzinfo), value.fold]


def _zone(zone: Any) -> Any:
    if zone is not None and _name_of(zone) not in ("datetime.timezone", "zoneinfo.ZoneInfo"):
        kind = type(zone).__name__
        raise Refused("x.isoformat()", f"whose time zone is a {kind}")
    return zone


def _from_iso(name: str) -> Callable[[str, Any, int], Any]:
    def make(text: str, zone: Any, fold: int) -> Any:
        return _of("datetime", name).fromisoformat(text).replace(tzinfo=zone, fold=fold)

    return make


def _zone_key(value: Any) -> Args:
    if value.key is None:
        raise Refused("its key, a str", "which was read from a file")
    return [value.key]


def _dtype(value: Any) -> Args:
    if _numpy.code_of(value.str) is None or value.metadata:
        raise Refused("str(x)")
    return [value.str]


def _make_dtype(numpy: Any, name: str) -> Any:
    if _numpy.code_of(name) is None:
        raise ValueError("not a plain dtype")
    return numpy.dtype(name)


def _torch_name(value: object) -> Args:
    return [str(value).removeprefix("torch.")]


def _torch_constant(kind: str) -> Callable[[Any, str], Any]:
    def make(torch: Any, name: str) -> Any:
        value = vars(torch).get(name)  # getattr would make torch import modules
        if type(value) is not getattr(torch, kind):
            raise UnsupportedError(f"torch {torch.__version__} has no {kind} {name!r}")
        return value

    return make


def _of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _calls(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls a type of the standard library, imported on demand."""
    return lambda *args: _of(module, name)(*args)


_TEXT, _NUMBERS = ((str,),), ((int,), (int,), (int,))
_ZONED = ((str,), (object,), (int,))
_KINDS = {
    "builtins.complex": _Kind(lambda z: [z.real, z.imag], ((float,), (float,)), complex),
    "builtins.range": _Kind(lambda r: [r.start, r.stop, r.step], _NUMBERS, range),
    "builtins.slice": _Kind(_slice, (_INT, _INT, _INT), slice),
    "builtins.bytearray": _Kind(lambda b: [bytes(b)], ((bytes,),), bytearray),
    "io.BytesIO": _Kind(_bytes_io, ((bytes,), (int,)), _make_bytes_io),
    "datetime.date": _Kind(
        lambda d: [d.isoformat()], _TEXT, lambda text: _of("datetime", "date").fromisoformat(text)
    ),
    "datetime.time": _Kind(_zoned, _ZONED, _from_iso("time")),
    "datetime.datetime": _Kind(_zoned, _ZONED, _from_iso("datetime")),
    "datetime.timedelta": _Kind(
        lambda d: [d.days, d.seconds, d.microseconds], _NUMBERS, _calls("datetime", "timedelta")
    ),
    "datetime.timezone": _Kind(
        lambda z: [z.utcoffset(None), z.tzname(None) if len(z.__getinitargs__()) > 1 else None],
        ((object,), (str, type(None))),
        lambda offset, name: _of("datetime", "timezone")(
            *[offset, name][: 1 if name is None else 2]
        ),
    ),
    "zoneinfo.ZoneInfo": _Kind(_zone_key, _TEXT, _calls("zoneinfo", "ZoneInfo")),
    "decimal.Decimal": _Kind(lambda d: [str(d)], _TEXT, _calls("decimal", "Decimal")),
    "fractions.Fraction": _Kind(
        lambda f: [f.numerator, f.denominator], ((int,), (int,)), _calls("fractions", "Fraction")
    ),
    "uuid.UUID": _Kind(lambda u: [str(u)], _TEXT, _calls("uuid", "UUID")),
    "numpy.str_": _Kind(lambda s: [str(s)], _TEXT, lambda numpy, s: numpy.str_(s), "numpy"),
    "numpy.bytes_": _Kind(
        lambda b: [bytes(b)], ((bytes,),), lambda numpy, b: numpy.bytes_(b), "numpy"
    ),
    "numpy.dtype": _Kind(_dtype, _TEXT, _make_dtype, "numpy"),
    "torch.layout": _Kind(_torch_name, _TEXT, _torch_constant("layout"), "torch"),
    "torch.memory_format": _Kind(_torch_name, _TEXT, _torch_constant("memory_format"), "torch"),
    "torch.torch_version.TorchVersion": _Kind(
        lambda v: [str(v)], _TEXT, lambda torch, v: torch.torch_version.TorchVersion(v), "torch"
    ),
    **{
        f"pathlib.{name}": _Kind(_path, _TEXT, _calls("pathlib", name))
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
