"""Values that programs keep in their state: each loads equal, or a save refuses it.

The table in docs/values.md lists the same values.
"""

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import math
import pathlib
import random
import re
import threading
import types
import typing
import uuid
import zoneinfo

import numpy as np
import torch


class Color(enum.Enum):
    RED = "r"
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):  # noqa: UP042
    TRAIN = "train"


class Flags(enum.Flag):
    A = 1
    B = 2


Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    step: int
    name: str = "a"


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    name: str = "adam"
    nested: typing.Any = None

    @functools.cached_property
    def half(self):
        return self.lr / 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: Color = Color.RED


@dataclasses.dataclass
class Checked:
    """A dataclass whose constructor has a side effect, which a load must not repeat."""

    a: int
    total: int = dataclasses.field(init=False)
    made: typing.ClassVar[int] = 0

    def __post_init__(self):
        Checked.made += 1
        self.total = self.a + 1


class Outer:
    @dataclasses.dataclass
    class Inner:
        a: int = 1


class Name(str):
    pass


class Counted(int):
    pass


class Settings(dict):
    pass


class Items(list):
    pass


class Thing:
    def __init__(self):
        self.a = 1


@dataclasses.dataclass
class Closing:
    path: str = ""

    def __del__(self):
        pass


@dataclasses.dataclass
class Failure(Exception):
    code: int = 1


def read_bytes():
    stream = io.BytesIO(b"0123456789")
    stream.seek(4)
    return stream


def with_extra():
    config = Config()
    config.extra = 1
    return config


def cached():
    config = Config(lr=0.5)
    assert config.half == 0.25
    return config


def local():
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


def closed():
    stream = io.BytesIO(b"x")
    stream.close()
    return stream


class Plain(datetime.tzinfo):
    def utcoffset(self, when):
        return datetime.timedelta(0)


TZ = datetime.timezone(datetime.timedelta(hours=2), "CEST")

EQUAL = {
    "None": lambda: None,
    "bool": lambda: True,
    "int": lambda: 7,
    "large int": lambda: -(2**80),
    "float": lambda: 0.1,
    "nan": lambda: math.nan,
    "str": lambda: "text ä",
    "bytes": lambda: b"\0\xff",
    "list": lambda: [1, [2.0, "a"]],
    "tuple": lambda: (1, (2.0, None)),
    "dict": lambda: {"a": 1, "b": {"c": 2}},
    "dict with other keys": lambda: {"in": [{1: "a", (2, 3): None}]},
    "OrderedDict": lambda: [collections.OrderedDict(b=1, a=2)],
    "Counter": lambda: [collections.Counter("abca")],
    "defaultdict": lambda: [collections.defaultdict(list, {"a": [1]})],
    "defaultdict without a factory": lambda: [collections.defaultdict(None, {1: 2})],
    "deque": lambda: collections.deque([1, (2, 3)], maxlen=5),
    "set": lambda: {"b", "a", "c"},
    "set of several types": lambda: {1, "a", None, (2.5, b"x"), frozenset({3})},
    "frozenset": lambda: frozenset({3, 1, 2}),
    "empty set": set,
    "complex": lambda: complex(-0.0, math.inf),
    "range": lambda: range(1, 10, 3),
    "slice": lambda: slice(None, 5),
    "bytearray": lambda: bytearray(b"\0ab"),
    "BytesIO": read_bytes,
    "Path": lambda: pathlib.Path("runs/ä/step-1"),
    "PurePosixPath": lambda: pathlib.PurePosixPath("/a/b"),
    "PureWindowsPath": lambda: pathlib.PureWindowsPath(r"c:\a"),
    "Enum": lambda: Color.BLUE,
    "IntEnum": lambda: Level.LOW,
    "str Enum": lambda: Mode.TRAIN,
    "Flag": lambda: Flags.A | Flags.B,
    "named tuple": lambda: Point(1, [2.0]),
    "NamedTuple": lambda: Typed(1, "b"),
    "dataclass": lambda: Config(lr=1.5, nested=[Config(), Color.RED]),
    "dataclass with a cached property": cached,
    "frozen dataclass with slots": lambda: Frozen(3),
    "dataclass with __post_init__": lambda: Checked(3),
    "nested dataclass": Outer.Inner,
    "argparse.Namespace": lambda: argparse.Namespace(lr=0.1, path=pathlib.Path("a"), tags={"x"}),
    "types.SimpleNamespace": lambda: types.SimpleNamespace(a=1, b=[2]),
    "sub-class of str": lambda: Name("a"),
    "date": lambda: datetime.date(2026, 1, 31),
    "time": lambda: datetime.time(1, 2, 3, 4),
    "datetime": lambda: datetime.datetime(2026, 1, 31, 1, 2, 3, 456, fold=1),
    "datetime with a zone": lambda: datetime.datetime(2026, 1, 31, tzinfo=TZ),
    "datetime of a place": lambda: datetime.datetime(
        2026, 7, 1, tzinfo=zoneinfo.ZoneInfo("Etc/UTC")
    ),
    "timedelta": lambda: datetime.timedelta(-1, 2, 3),
    "timezone": lambda: datetime.UTC,
    "Decimal": lambda: decimal.Decimal("1.10"),
    "Fraction": lambda: fractions.Fraction(-2, 3),
    "UUID": lambda: uuid.UUID(int=5),
    "random.getstate()": lambda: random.Random(1).getstate(),
    "numpy scalar": lambda: np.float32(0.1),
    "numpy bool": lambda: np.bool_(True),
    "numpy str": lambda: np.str_("a"),
    "numpy bytes": lambda: np.bytes_(b"a"),
    "numpy dtype": lambda: np.dtype("<f4"),
    "numpy array": lambda: np.arange(6, dtype="<i4").reshape(2, 3)[:, ::2],
    "big-endian array": lambda: np.arange(6, dtype=">i4"),
    "numpy get_state()": lambda: np.random.RandomState(1).get_state(),
    "numpy get_state(legacy=False)": lambda: np.random.RandomState(1).get_state(legacy=False),
    "numpy bit_generator.state": lambda: np.random.default_rng(1).bit_generator.state,
    "numpy Philox state": lambda: np.random.Philox(1).state,
    "torch.__version__": lambda: torch.__version__,
    "torch.Generator().get_state()": lambda: torch.Generator().manual_seed(1).get_state(),
    "torch.Size": lambda: torch.Size([1, 2]),
    "torch.dtype": lambda: torch.bfloat16,
    "torch.device": lambda: torch.device("cuda:1"),
    "torch.layout": lambda: torch.strided,
    "torch.memory_format": lambda: torch.channels_last,
    "tensor": lambda: torch.arange(6.0).view(2, 3),
    "tuple of tensors": lambda: (torch.ones(2), 1),
    "named tuple of tensors": lambda: Point(torch.ones(2), np.ones(3)),
    "dataclass of tensors": lambda: Config(nested=[torch.ones(2), torch.zeros(0)]),
    "deque of tensors": lambda: collections.deque([torch.ones(2)], maxlen=3),
    "defaultdict of tensors": lambda: [collections.defaultdict(dict, a={"b": torch.ones(2)})],
    "namespace of tensors": lambda: argparse.Namespace(a=torch.ones(2), b=(torch.ones(1),)),
}

# Values that a save refuses, and the replacement that its error suggests.
REFUSED = {
    "numpy Generator": (lambda: np.random.default_rng(1), "x.bit_generator.state"),
    "numpy RandomState": (lambda: np.random.RandomState(1), "x.get_state()"),
    "numpy BitGenerator": (lambda: np.random.PCG64(1), "x.state"),
    "numpy datetime64": (lambda: np.datetime64("2020-01-01"), "x.astype('i8')"),
    "numpy longdouble": (lambda: np.longdouble(1), "x.astype('f8')"),
    "array of datetime64": (lambda: np.array(["2020-01-01"], "M8[D]"), "x.view('i8')"),
    "array of objects": (lambda: np.array([Thing()], dtype=object), "x.tolist()"),
    "array of str": (lambda: np.array(["a"]), "x.tolist()"),
    "structured array": (lambda: np.zeros(1, [("a", "f4")]), "for name in x.dtype.names"),
    "masked array": (lambda: np.ma.masked_array([1, 2]), "x.data and x.mask"),
    "random.Random": (lambda: random.Random(1), "x.getstate()"),
    "torch.Generator": (torch.Generator, "x.get_state()"),
    "Module": (lambda: torch.nn.Linear(1, 1), "x.state_dict()"),
    "optimizer": (lambda: torch.optim.SGD([torch.ones(1)], lr=0.1), "x.state_dict()"),
    "storage": (lambda: torch.ones(1).untyped_storage(), "the tensor over it"),
    "loader": (lambda: torch.utils.data.DataLoader([1]), "torchdata's StatefulDataLoader"),
    "StringIO": (lambda: io.StringIO("a"), "x.getvalue()"),
    "closed BytesIO": (closed, "before it is closed"),
    "path that is not Unicode": (lambda: pathlib.Path("a\udcff"), "os.fsencode(x)"),
    "str that is not Unicode": (lambda: Name("a\udcff"), "surrogatepass"),
    "datetime of another zone": (
        lambda: datetime.datetime(2026, 1, 1, tzinfo=Plain()),
        "x.isoformat()",
    ),
    "defaultdict of a lambda": (lambda: [collections.defaultdict(lambda: 1)], "dict(x)"),
    "Counter of tuples": (lambda: [collections.Counter([(1, 2)])], "dict(x)"),
    "sub-class of dict": (lambda: [Settings(a=1)], "dict(x)"),
    "mappingproxy": (lambda: [types.MappingProxyType({"a": 1})], "dict(x)"),
    "sub-class of list": (lambda: (Items([1]),), "list(x)"),
    "sub-class of int": (lambda: Counted(1), "int(x)"),
    "struct sequence": (lambda: torch.ones(1, 1).max(0), "tuple(x)"),
    "object": (Thing, "vars(x)"),
    "dataclass with an attribute": (with_extra, "dataclasses.asdict(x)"),
    "dataclass with __del__": (Closing, "its fields as a dict"),
    "dataclass that is an exception": (Failure, "dataclasses.asdict(x)"),
    "dataclass of a function": (local, "module's top level"),
    "set of tensors": (lambda: {torch.ones(1)}, "list(x)"),
    "slice of objects": (lambda: slice("a", "b"), "[x.start, x.stop, x.step]"),
    "memoryview": (lambda: memoryview(b"a"), "bytes(x)"),
    "array.array": (lambda: array.array("d", [1]), "x.tolist()"),
    "re.Pattern": (lambda: re.compile("a"), "x.pattern"),
    "function": (lambda: len, "its name"),
    "lambda": (lambda: lambda: 1, "its name"),
    "type": (lambda: torch.optim.SGD, "its name"),
    "module": (lambda: torch, "its name"),
    "partial": (lambda: functools.partial(int, base=2), "x.args and x.keywords"),
    "generator": (lambda: iter([1]), "list(x)"),
    "exception": (lambda: ValueError("a"), "str(x)"),
    "lock": (threading.Lock, "what it is made of"),
    "quantized tensor": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.quint8),
        "int_repr",
    ),
}
