"""`import ringstow`: what it loads, and the names it promises, in `__all__`, docs and `dir`."""

import ast
import re
from pathlib import Path

from support import ROOT, python

import ringstow

PAGE = ROOT / "docs/which-call.md"
# Each takes at least milliseconds, torch seconds, and every data loader worker imports again.
UNWANTED = (
    *("asyncio", "concurrent.futures", "ctypes", "difflib", "email", "importlib.metadata"),
    *("multiprocessing", "numpy", "pickle", "ringstow.convert", "ringstow.dcp", "subprocess"),
    *("tempfile", "torch"),
)


def _imported_by(statement):
    script = (
        f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    )
    return set(python(script, check=True).stdout.split())


def test_import_loads_no_slow_module():
    imported = _imported_by("import ringstow")
    assert "ringstow._native" in imported
    assert sorted(imported.intersection(UNWANTED)) == []
    own = [name for name in imported if name.partition(".")[0] == "ringstow"]
    assert len(own) <= 25, sorted(own)


def test_first_use_of_each_name_loads_no_slow_module():
    uses = "import ringstow; ringstow.save, ringstow.load, ringstow.CheckpointManager"
    assert sorted(_imported_by(uses).intersection(UNWANTED)) == []


def test_modules_that_import_torch_are_imported_on_first_use():
    loaded = _imported_by("import ringstow; ringstow.distributed.save, ringstow.dcp.StorageWriter")
    assert {"ringstow.distributed", "ringstow.dcp", "torch"} <= loaded
    loaded = _imported_by("import ringstow; ringstow.integrations, ringstow.convert")
    assert "ringstow.integrations" in loaded
    assert "torch" not in loaded
    assert not hasattr(ringstow, "integration")
    assert not hasattr(ringstow.integrations, "_saves_of_nobody")


def test_every_public_name_exists():
    imported = _imported_by("import ringstow; [getattr(ringstow, n) for n in ringstow.__all__]")
    assert "ringstow._reports._io_reports" in imported
    assert "torch" not in imported


def test_type_checkers_see_every_public_name():
    # `__getattr__` would hide from the interpreter what is not imported for them.
    body = ast.parse(Path(ringstow.__file__).read_text()).body
    typed = [node for node in body if isinstance(node, ast.If)]
    imports = [node for block in (body, *(node.body for node in typed)) for node in block]
    names = {
        alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(set(ringstow.__all__) - names) == []


def test_dcp_storage_names_the_torch_it_needs():
    script = (
        "import sys, types; "
        "sys.modules['torch.distributed.tensor'] = types.ModuleType('an older one'); "
        "import ringstow.dcp"
    )
    ran = python(script)
    assert ran.returncode == 1
    assert "ImportError: ringstow.dcp needs torch 2.6 or newer: " in ran.stderr


def promised():
    """Return the names that the page lists: those of the errors, and all others."""
    page = PAGE.read_text()
    errors = re.findall(r"^\| `(\w+Error)`", page, re.M)
    rows = page.partition("## All names")[2].splitlines()
    return {*errors, *re.findall(r"`(\w+)`", "\n".join(row for row in rows if row[:1] == "|"))}


def test_page_lists_what_is_exported():
    assert promised() == {*ringstow.__all__, *ringstow._MODULES}


def test_dir_has_every_name():
    assert promised() | {"__version__"} <= set(dir(ringstow))


def test_every_handle_is_a_save_handle(tmp_path):
    with ringstow.CheckpointManager(tmp_path) as manager:
        assert isinstance(manager.save_async(1, {"a": 1}), ringstow.SaveHandle)
    lacking = [
        name
        for name, value in vars(ringstow.SaveHandle).items()
        if not name.startswith("_") and not getattr(value, "__doc__", "")
    ]
    assert lacking == []
