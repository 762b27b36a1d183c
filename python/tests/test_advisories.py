"""What the answers of pip-audit mean, with made-up answers."""

import advisories
import pytest

UNKNOWN = {"name": "numpy", "skip_reason": "not found on PyPI"}
CLEAN = {"name": "numpy", "version": "2.4.0", "vulns": []}
VULNERABLE = [{"id": "PYSEC-2025-41", "fix_versions": ["2.6.0"]}]
BAD = {"name": "torch", "version": "2.5.0", "vulns": VULNERABLE}


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([CLEAN, UNKNOWN | {"name": "torch"}], 0, "1 of 2 packages audited, 0 vulnerable"),
        ([CLEAN, BAD], 1, "torch 2.5.0: PYSEC-2025-41, mended in 2.6.0"),
        ([UNKNOWN], advisories.NO_DATABASE, "skipped: "),
        ([], advisories.NO_DATABASE, "skipped: "),
    ],
)
def test_only_packages_that_the_database_knows_count_as_audited(packages, code, said, capsys):
    assert advisories.judge(packages) == code
    assert said in capsys.readouterr().out
