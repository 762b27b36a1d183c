"""Name the installed Python packages that have known vulnerabilities, by pip-audit.

    python tools/advisories.py    # of the environment that runs it

Exits with 1 if a package has one, and with 77 if the database cannot be reached: pip-audit takes a
package of which its index knows nothing for one without vulnerabilities.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

NO_DATABASE = 77


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(ran.stdout)["dependencies"]
    except ValueError:
        reason = ran.stderr.strip().rpartition("\n")[2]
        print(f"skipped: pip-audit has no answer: {reason or f'exit code {ran.returncode}'}")
        return NO_DATABASE
    return judge(packages)


def judge(packages: list[dict[str, Any]]) -> int:
    """Print what pip-audit found, and return the exit code."""
    audited = [package for package in packages if "vulns" in package]
    if not any(package["name"] == "numpy" for package in audited):
        print("skipped: the database of pip-audit cannot be reached: it does not know numpy")
        return NO_DATABASE
    bad = [package for package in audited if package["vulns"]]
    for package in bad:
        for found in package["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "none"
            name = f"{package['name']} {package['version']}"
            print(f"{name}: {found['id']}, mended in {fixed}")
    print(f"{len(audited)} of {len(packages)} packages audited, {len(bad)} vulnerable")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
