import os
import re
from importlib.util import find_spec
from pathlib import Path

# Without `pip install '.[language]'` there is nothing to test.
collect_ignore_glob = [] if find_spec("transformers") and find_spec("datasets") else ["test_*.py"]


def pytest_configure(config):
    """Register the marks of transformers' own tests; see test_common_suite.py."""
    source = os.environ.get("TRANSFORMERS_SOURCE")
    for file in Path(source, "tests").glob("**/test_*.py") if source else ():
        for mark in re.findall(r"\bmark\.(\w+)", file.read_text(encoding="utf-8")):
            config.addinivalue_line("markers", f"{mark}: of transformers")
