import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SDIST = os.environ.get("TIMM_SDIST", "")


@pytest.mark.slow
@pytest.mark.skipif(not SDIST, reason="TIMM_SDIST does not name an unpacked sdist of timm")
def test_timms_own_tests_pass():
    """timm's tests/test_models.py as it runs for a stock ViT; see timm_suite_plugin.py."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "timm_suite_plugin"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/test_models.py"],
        cwd=SDIST,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) >= 10
    assert "skipped" not in run.stdout.splitlines()[-1]
