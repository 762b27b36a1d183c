"""Checks the parts of a framework that an adapter uses: refuses missing, warns of untested."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from ringstow._core._errors import UnsupportedError

_log = logging.getLogger("ringstow")


class Seam(NamedTuple):
    """The parts of a package that an adapter uses."""

    package: str
    """The installed name."""
    tested: str
    """The minor version that the tests use, such as ``"2.6"``."""
    page: str
    """The adapter's page in docs/trainers."""
    calls: Mapping[Any, Mapping[str, str]] = {}
    """For each module or class, its functions with the arguments that the adapter uses or takes."""
    hooks: Mapping[Any, frozenset[str]] = {}
    """For each abstract class, the methods that the adapter defines."""

    def refuse(self, problems: Iterable[str]) -> None:
        """Refuse a package with these problems.

        Raises:
            UnsupportedError: names the problems, if there are any.
        """
        if found := "; ".join(problems):
            raise UnsupportedError(
                f"{self.package} {self._version()} saves in another way: {found}. "
                f"docs/trainers/{self.page}.md has the versions that work"
            )

    def check(self) -> None:
        """Refuse a package that would fail; warn of a version that is not tested.

        New arguments are accepted if they have a default.

        Raises:
            UnsupportedError: names the missing parts.
        """
        self.refuse([*self._changed(), *self._unknown_hooks()])
        here = self._version()
        if here.split(".")[:2] != self.tested.split("."):
            _log.warning(
                "%s %s is not tested with ringstow, and %s is: docs/trainers/%s.md",
                self.package,
                here,
                self.tested,
                self.page,
            )

    def _version(self) -> str:
        try:
            return version(self.package)
        except PackageNotFoundError:  # the package runs from its sources
            return "of unknown version"

    def _changed(self) -> Iterable[str]:
        for owner, calls in self.calls.items():
            for name, arguments in calls.items():
                if not _takes(getattr(owner, name, None), arguments.split()):
                    where = owner.__name__.rpartition(".")[2]
                    wanted = ", ".join(arguments.split())
                    yield f"its {where}.{name} is not {name}({wanted})"

    def _unknown_hooks(self) -> Iterable[str]:
        for kind, names in self.hooks.items():
            if differ := sorted(kind.__abstractmethods__ ^ names):
                yield f"its {kind.__name__} has other abstract methods: {', '.join(differ)}"


def _takes(function: Any, arguments: list[str]) -> bool:
    """Return whether a function takes these arguments, in this order, and requires no others."""
    if function is None:
        return False
    found = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    needs = {
        one.name
        for one in found
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    return [one.name for one in found if one.name in arguments] == arguments and (
        needs <= {*arguments}
    )
