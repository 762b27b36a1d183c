"""The text on each trainer names the versions that the tests run: installed, or in Cargo.lock."""

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


def trainers():
    """Return the text on each trainer by its name: a page, or a section of a page of several."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if "\n### Tested\n" not in text:
            found[page.stem] = text
            continue
        for section in re.split(r"\n(?=## )", text)[1:]:
            if "\n### Tested\n" in section:
                name = section.splitlines()[0].removeprefix("## ")
                found[name.lower().removesuffix("-core")] = section.replace("\n### ", "\n## ")
    return found


TRAINERS = trainers()


def test_every_trainer_has_its_text():
    assert [*TRAINERS] == [
        "transformers", "accelerate", "torchtitan", "megatron", "deepspeed", "nvrx", "lightning",
        "ray",
    ]  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_the_page_names_the_versions_that_are_tested(name):
    tested = TRAINERS[name].split("\n## Tested\n")[1]
    found = re.findall(rf"({'|'.join(PACKAGES)}) (\d+\.\d+)", tested)
    named = dict(reversed(found))  # the first one counts
    assert "PyTorch" in named
    assert name in {package.lower().removesuffix("-core") for package in named}
    assert named == {one: minor(importlib.metadata.version(PACKAGES[one])) for one in named}


@pytest.mark.parametrize("name", TRAINERS)
def test_all_pages_have_one_form(name):
    text = TRAINERS[name]
    assert "the line that changes" in text.split("\n## What you gain")[0]
    places = [text.index(f"\n## {title}\n") for title in FORM]
    assert places == sorted(places)


@pytest.mark.parametrize("page", CRATES)
def test_the_page_of_a_rust_trainer_names_the_version_that_is_locked(page):
    called, crate = CRATES[page]
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    versions = {minor(one["version"]) for one in locked if one["name"] == crate}
    text = (ROOT / "docs/rust.md").read_text()
    assert set(re.findall(rf"{called} (\d+\.\d+)", text)) == versions
