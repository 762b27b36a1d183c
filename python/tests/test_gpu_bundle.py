"""tools/gpu_bundle.py: the folder holds all that its scripts import."""

from pathlib import Path

import gpu_bundle
from support import python


def test_the_scripts_run_from_the_folder_alone(tmp_path):
    gpu_bundle.put_scripts(tmp_path)
    modules = [Path(name).stem for name in gpu_bundle.SCRIPTS]
    program = f"import {', '.join(modules)}, comparing.worker"
    python(program, cwd=tmp_path, check=True)
