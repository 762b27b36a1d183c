"""tools/gpu_bundle.py: the folder holds all that its scripts import."""

import subprocess
import sys
from pathlib import Path

import gpu_bundle


def test_the_scripts_run_from_the_folder_alone(tmp_path):
    gpu_bundle.put_scripts(tmp_path)
    modules = [Path(name).stem for name in gpu_bundle.SCRIPTS]
    program = f"import {', '.join(modules)}, comparing.worker"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
