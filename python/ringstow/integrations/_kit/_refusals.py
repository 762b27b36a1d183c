"""Refuses setups that an adapter cannot save, and settings without effect, with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ringstow._core._config import given
from ringstow._core._errors import InvalidStateError, UnsupportedError

if TYPE_CHECKING:
    from ringstow._core._config import Config


def refuse_tiers(config: Config | None) -> None:
    """Refuse settings that name tiers: checkpoints have other names until they are finished.

    Raises:
        InvalidStateError: the settings do.
    """
    found = given(config)
    if found.tiers:
        raise InvalidStateError(
            f"checkpoints are not copied to Config.tiers ({found.tiers[0]}) here: give a config "
            "with tiers=[], and copy finished ones by ringstow.promote"
        )


def refuse_places(config: Config | None, why: str = "they get their name by a rename") -> None:
    """Refuse settings that stripe checkpoints, or name tiers; ``why`` says what stripes break.

    Raises:
        InvalidStateError: the settings do.
    """
    refuse_tiers(config)
    if given(config).stripe:
        raise InvalidStateError(
            f"checkpoints cannot be striped here: {why}. Give a config with stripe=[]"
        )


def refuse(who: str, used: Mapping[str, tuple[object, str]]) -> None:
    """Refuse a framework's setup that an adapter cannot save.

    Args:
        who: the adapter.
        used: by name of each feature, whether it is used, and what to do instead.

    Raises:
        UnsupportedError: names all features that are used.
    """
    found = [f"{name}: {remedy}" for name, (is_used, remedy) in used.items() if is_used]
    if found:
        raise UnsupportedError(f"{who} does not go with {'; nor with '.join(found)}")
