"""What `make site` adds to docs/: README as its first page, the reference, links out of docs/.

A hook of mkdocs, named in mkdocs.yml.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import Counter
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FROM_ROOT = {"README.md": "index.md"}
"""Files beside docs/ that are pages of the site."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
NAMED = re.compile(r"\[([\w/-]+\.md)\]\(([\w./-]+\.md)(?=[)#])")
"""A link whose text is the name of a file."""

REFERENCE = {
    "calls": (
        "Saves and loads",
        "save save_async SaveHandle load load_into open Checkpoint Entry Salvaged DamagedTensor "
        "MappedState allow_types TensorParts verify open_write open_read FileWriter FileReader "
        "Base Config Stack Unstack Concat Split Transpose release_memory",
    ),
    "manager": (
        "CheckpointManager",
        "CheckpointManager Retention Tiers Nodes Previous Restored RngState PerRank When "
        "EverySteps AtSteps First Every Continuous OnSignal Before",
    ),
    "runs": (
        "Runs",
        "latest steps Step CheckpointInfo retain Retained remove Removed Left prune Swept slim "
        "Slimmed diff DiffReport ElementDiff TensorChange TensorDiff ValueDiff promote "
        "wait_promoted on_done Listener Outcome",
    ),
    "reports": (
        "Reports",
        "SaveReport SaveSeconds LoadReport LoadSeconds WriteReport WriteSeconds PromotionReport "
        "VerifyReport Damage Fallback Progress",
    ),
}
"""Title and names of each page about `ringstow` itself; all errors are one more."""
MODULES = ("distributed", "dcp", "convert", "monitoring")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in FROM_ROOT.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, name, content=text))
    for name, text in _reference().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """Rewrite each link to the page of the site, with its title, or else to the repository."""
    name = page.file.src_uri
    at = {site: source for source, site in FROM_ROOT.items()}.get(name, f"docs/{name}")

    def rewritten(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        to = posixpath.normpath(posixpath.join(posixpath.dirname(at), path))
        site = FROM_ROOT.get(to) or (to.removeprefix("docs/") if to.startswith("docs/") else None)
        found = files.get_file_from_path(site) if site else None
        if site is None or found is None or found.inclusion is InclusionLevel.EXCLUDED:
            if not (ROOT / to).exists():
                raise PluginError(f"{at} links to {path}, which does not exist")
            kind = "tree" if (ROOT / to).is_dir() else "blob"
            return f"{config.repo_url}/{kind}/main/{to}{anchor}"
        return posixpath.relpath(site, posixpath.dirname(name) or ".") + anchor

    def titled(link: re.Match[str]) -> str:
        return f"[{_title(ROOT / posixpath.dirname(at) / link[2])}]({link[2]}"

    # A reader of the site knows titles, not names of files.
    return LINK.sub(rewritten, NAMED.sub(titled, markdown))


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Make links of the pages that docstrings name, and drop the colons of their code blocks."""
    if not page.file.src_uri.startswith("reference/"):
        return html

    def titled(named: re.Match[str]) -> str:
        return f'<a href="../{named[1]}.html">{_title(ROOT / named[0])}</a>'

    html = re.sub(r"<p>::</p>|:(?=:</p>)", "", html)
    return re.sub(r"\bdocs/([\w/-]+)\.md\b", titled, html)


def _title(page: Path) -> str:
    """Return a page's first heading, or the file's name if it has none."""
    heading = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE) if page.is_file() else None
    return heading[1] if heading else page.name


def _reference() -> dict[str, str]:
    """Return the pages of the reference by name.

    Raises:
        PluginError: a public name is on no page, or one that is not public is.
    """
    public = _exported("ringstow")
    listed = {name: words.split() for name, (_, words) in REFERENCE.items()}
    errors = [name for name in public if name.endswith(("Error", "Warning"))]
    known = Counter([*errors, *(word for words in listed.values() for word in words)])
    if known != Counter(public):
        different = sorted((known - Counter(public)) + (Counter(public) - known))
        raise PluginError(f"the reference's pages and ringstow.__all__ differ in {different}")
    pages = {name: _page(REFERENCE[name][0], "ringstow", words) for name, words in listed.items()}
    pages["errors"] = _page("Errors", "ringstow", errors)
    pages["integrations"] = _integrations()
    for module in MODULES:
        full = f"ringstow.{module}"
        pages[module] = _page(full, full, _exported(full))
    return pages


def _integrations() -> str:
    """Return the page of the trainers' integrations: of each module what it defines itself.

    Classes that are made when a framework is imported, such as Lightning's, cannot be read here.
    """
    text = "# ringstow.integrations\n\nThe pages of the trainers show how to use them.\n"
    for file in sorted((ROOT / "python/ringstow/integrations").glob("[!_]*.py")):
        module = f"ringstow.integrations.{file.stem}"
        made = ast.ClassDef | ast.FunctionDef
        defined = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, made)}
        if names := [name for name in _exported(module) if name in defined]:
            text += "\n#" + _page(file.stem, module, names)
    return text


def _page(title: str, module: str, names: list[str]) -> str:
    # The methods of handles are those of the class that both share.
    of_handles = "\n    options: {inherited_members: true}"
    shown = (f"::: {module}.{one}{of_handles if one.endswith('Handle') else ''}" for one in names)
    return f"# {title}\n\n" + "\n\n".join(shown) + "\n"


def _exported(module: str) -> list[str]:
    """Return a module's public names, without importing it."""
    path = ROOT / "python" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    made = (node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [name for name in made if not name.startswith("_")]
