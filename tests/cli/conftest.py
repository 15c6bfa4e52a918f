"""Fixtures that the tests of several commands share."""

import os

import pytest


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture
def bomb(tmp_path):
    """An object whose unpickling runs code; the code has not run by the end of the test."""
    yield Bomb(tmp_path / "boom")
    assert not (tmp_path / "boom").exists()
