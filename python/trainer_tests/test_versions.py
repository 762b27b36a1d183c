"""Each trainer's page names the versions that the tests run: installed, or in Cargo.lock."""

import importlib.metadata
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs" / "trainers"
FORM = ["What you gain", "Load elsewhere", "Not supported", "Tested"]
# How a page calls a package, and the package.
PACKAGES = {
    "Accelerate": "accelerate",
    "DeepSpeed": "deepspeed",
    "Lightning": "lightning",
    "Megatron-Core": "megatron-core",
    "NVRx": "nvidia-resiliency-ext",
    "PEFT": "peft",
    "PyTorch": "torch",
    "Ray": "ray",
    "Transformers": "transformers",
    "torchtitan": "torchtitan",
}
# The same for Rust's: the page of a trainer, how it calls the crate, and the crate.
CRATES = {"burn": ("burn-core", "burn-core"), "candle": ("candle", "candle-core")}


def minor(version):
    return ".".join(version.split(".")[:2])


@pytest.mark.parametrize(
    "page",
    sorted(set(DOCS.glob("*.md")) - {DOCS / f"{name}.md" for name in CRATES}),
    ids=lambda page: page.stem,
)
def test_the_page_names_the_versions_that_are_tested(page):
    tested = page.read_text().split("\n## Tested\n")[1]
    found = re.findall(rf"({'|'.join(PACKAGES)}) (\d+\.\d+)", tested)
    named = dict(reversed(found))  # the first one counts
    assert "PyTorch" in named
    assert page.stem in {name.lower().removesuffix("-core") for name in named}
    assert named == {name: minor(importlib.metadata.version(PACKAGES[name])) for name in named}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_all_pages_have_one_form(page):
    text = page.read_text()
    assert "the line that changes" in text.split("\n## ")[0]
    places = [text.index(f"\n## {title}\n") for title in FORM]
    assert places == sorted(places)


@pytest.mark.parametrize("page", CRATES)
def test_the_page_of_a_rust_trainer_names_the_version_that_is_locked(page):
    called, crate = CRATES[page]
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    versions = {minor(one["version"]) for one in locked if one["name"] == crate}
    tested = (DOCS / f"{page}.md").read_text().split("\n## Tested\n")[1]
    assert set(re.findall(rf"{called} (\d+\.\d+)", tested)) == versions
