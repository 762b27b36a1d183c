"""Lists and dicts of DCP's plans that are sent between ranks as columns, or as a token.

Torch pickles an object for every item. These lists and dicts pickle as columns, or as a token if
the receiver has the content already. A list or dict that was changed after it was made pickles as a
plain one.
"""

from __future__ import annotations

import collections
import math
import operator
import secrets
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ringstow._core._errors import Error

T = TypeVar("T")
Token = str

# Two dicts of each of the last two structures.
_RECENT_MAX = 4


class Content:
    """The immutable contents of lists or dicts; ranks that have it identify it by its token."""

    def __init__(
        self,
        decode: Callable[[Any], Any],
        *,
        made: Any = None,
        columns: Any = None,
        encode: Callable[[Any], Any] | None = None,
        token: Token = "",
    ) -> None:
        """Keep a list or dict, or its columns.

        Args:
            decode: makes the list or dict from its columns.
            made: the list or dict.
            columns: the columns to send.
            encode: makes the columns from the list or dict, when they are needed.
            token: the token of another process's content.
        """
        self.decode = decode
        self.token = token or secrets.token_hex(16)
        self.memo: dict[Any, Any] = {}
        """Cached results that others have computed from it."""
        self._encode = encode
        self._made, self._columns = made, columns
        _held[self.token] = self

    @property
    def made(self) -> Any:
        """The list or dict itself; copy it before passing it on."""
        if self._made is None:
            self._made = self.decode(self._columns)
        return self._made

    @property
    def columns(self) -> Any:
        """The columns that are sent instead."""
        if self._columns is None and self._encode is not None:
            self._columns = self._encode(self._made)
        return self._columns


# The contents in this process; weak references, so that their owners decide how long they live.
_held: weakref.WeakValueDictionary[Token, Content] = weakref.WeakValueDictionary()


def _arrived(decode: Callable[[Any], Any], token: Token, columns: Any) -> Content | None:
    """Return the content that another rank has sent; None if this process does not have it."""
    content = _held.get(token)
    if content is None and columns is not None:
        content = Content(decode, columns=columns, token=token)
    return content


class Items(list[Any]):
    """The items of a plan."""

    content: Content | None = None
    """None if this process does not have the list's content."""
    absent: tuple[Callable[[Any], Any], Token] | None = None
    """The token of a content that this process does not have."""
    is_known = False
    """Whether the receiver has the content, or does not need it."""
    note: Any = None
    """Extra data from the sender to the receiver."""

    @classmethod
    def over(cls, content: Content, *, is_known: bool = False, note: Any = None) -> Items:
        """Return a list of a content's items."""
        items = cls(content.made)
        items.content, items.is_known, items.note = content, is_known, note
        return items

    def __iter__(self) -> Iterator[Any]:
        """Raise instead of appearing empty if the items were not sent."""
        if self.absent is not None and not self:
            raise Error("the items of this plan are on another rank, which sent only their number")
        return super().__iter__()

    def unchanged(self) -> Content | None:
        """Return the content, if this list still holds exactly that."""
        content = self.content
        if content is None or len(content.made) != len(self):
            return None
        return content if all(map(operator.is_, content.made, self)) else None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.absent is not None and not self:
            return _items_arrived, (*self.absent, None, self.note)
        content = self.unchanged()
        if content is None:
            return list, (), None, iter(self)
        columns = None if self.is_known else content.columns
        return _items_arrived, (content.decode, content.token, columns, self.note)


def _items_arrived(decode: Callable[[Any], Any], token: Token, columns: Any, note: Any) -> Items:
    content = _arrived(decode, token, columns)
    if content is None:  # an error here would leave the other ranks waiting: see `check`
        items = Items()
        items.absent, items.note = (decode, token), note
        return items
    return Items.over(content, is_known=columns is None, note=note)


def check(items: list[Any]) -> None:
    """Refuse items that did not arrive.

    Raises:
        Error: this process does not have the content that the sender assumes.
    """
    if type(items) is Items and items.absent is not None:
        raise Error(
            "a rank has sent a plan as known that this rank does not know, and nothing was done. "
            "Try again: the ranks then send complete plans"
        )


def leave_here(items: list[Any]) -> None:
    """Do not send a plan's items: the receiver has them, or only sends them back."""
    if type(items) is Items:
        items.is_known = True


class Table(dict[str, Any]):
    """A dict of a plan, or of DCP's Metadata while it is sent to the other ranks."""

    content: Content | None = None
    is_known = False
    """Whether all receivers have the content."""
    _shorts: float = math.inf
    """How many more times it pickles as columns or a token."""

    @classmethod
    def over(cls, content: Content, *, is_known: bool = False) -> Table:
        """Return a dict of a content."""
        table = cls(content.made)
        table.content, table.is_known = content, is_known
        return table

    @classmethod
    def once(cls, content: Content, *, is_known: bool) -> Table:
        """Return a dict of Metadata: only its next pickle is sent to other ranks.

        It arrives as a plain dict.
        """
        table = cls.over(content, is_known=is_known)
        table._shorts = 1
        return table

    def unchanged(self) -> Content | None:
        """Return the content, if this dict still holds exactly that."""
        return unchanged_dict(self, self.content)

    def __reduce_ex__(self, protocol: Any) -> Any:
        content = self.unchanged() if self._shorts else None
        self._shorts = max(self._shorts - 1, 0)
        if content is None:
            return dict, (), None, None, iter(self.items())
        columns = None if self.is_known else content.columns
        arrive = _table_arrived if self._shorts else _dict_arrived
        return arrive, (content.decode, content.token, columns)


def unchanged_dict(table: dict[str, Any], content: Content | None) -> Content | None:
    """Return the content of a dict, if the dict still holds exactly that."""
    if content is None or len(content.made) != len(table):
        return None
    is_same = all(map(operator.eq, content.made, table)) and all(
        map(operator.is_, content.made.values(), table.values())
    )
    return content if is_same else None


def _table_arrived(decode: Callable[[Any], Any], token: Token, columns: Any) -> Table:
    content = _arrived(decode, token, columns)
    if content is None:  # the plan's items are missing too
        return Table()
    return Table.over(content, is_known=columns is None)


# Parts of the Metadata that this process has received.
_recent: collections.deque[Content] = collections.deque(maxlen=_RECENT_MAX)


def _dict_arrived(decode: Callable[[Any], Any], token: Token, columns: Any) -> dict[str, Any]:
    content = _arrived(decode, token, columns)
    if content is None:
        raise Error("the checkpoint was saved, but its Metadata did not arrive on this rank")
    if content not in _recent:
        _recent.append(content)
    return dict(content.made)


def received() -> list[Content]:
    """Return the parts of Metadata that this process has."""
    return list(_recent)
