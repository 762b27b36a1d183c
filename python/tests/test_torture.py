"""tools/torture.py, the Makefile and the page about tests name the same rigs."""

import re

from support import ROOT
from torture import RIGS

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = sorted(re.findall(r"^torture-([a-z-]+):(?! export)", MAKEFILE, re.MULTILINE))
# Targets without a promise of their own.
ALONE = ["address", "miri", "threads"]


def test_each_rig_is_listed_once_and_is_a_target():
    assert sorted([*ALONE, *(rig.name for rig in RIGS)]) == TARGETS


def test_full_length_is_the_makefile_s_default():
    defaults = dict(re.findall(r"^([A-Z_]+) *\?= *(\S+)$", MAKEFILE, re.MULTILINE))
    # MINUTES is of several rigs.
    full = {rig.variable: str(rig.full) for rig in RIGS if rig.variable != "MINUTES"}
    assert full.items() <= defaults.items()


def test_each_target_is_explained_once():
    page = (ROOT / "docs" / "internals" / "testing.md").read_text()
    for text, before in ((MAKEFILE, '@echo "'), (page, "`")):
        named = re.findall(rf"{before}make torture-([a-z-]+)", text)
        assert sorted(named) == TARGETS
