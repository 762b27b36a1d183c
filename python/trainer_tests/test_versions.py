"""Each trainer's page names the versions that these tests run."""

import importlib.metadata
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "trainers"
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


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_the_page_names_the_versions_that_are_tested(page):
    tested = page.read_text().split("\n## Tested\n")[1]
    found = re.findall(rf"({'|'.join(PACKAGES)}) (\d+\.\d+)", tested)
    named = dict(reversed(found))  # the first one counts
    assert "PyTorch" in named
    assert page.stem in {name.lower().removesuffix("-core") for name in named}
    installed = {name: importlib.metadata.version(PACKAGES[name]) for name in named}
    minor = {name: ".".join(version.split(".")[:2]) for name, version in installed.items()}
    assert named == minor
