"""Tables show all of their numbers, whatever the width of the terminal."""

import io
import sys

import pytest
from rich.table import Table

from tokenformer_vit.cli.tables import print_table

NUMBERS = ("114,759,400", "110,591,778.816", "86,567,656", "110,591,778.817", "0.25")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("width", [20, 60, 76, 200])
def test_no_number_is_cut(stream, width, monkeypatch):
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "50")  # without it rich takes a dumb terminal as 80 wide
    monkeypatch.setenv("TERM", "dumb" if stream is Terminal else "")
    table = Table("part", title="a title")
    for _ in NUMBERS:
        table.add_column("two words", justify="right")
    table.add_row("token-token attention", *NUMBERS)
    print_table(table)
    words = out.getvalue().replace("│", " ").split()
    assert "…" not in out.getvalue()
    assert set(NUMBERS) < set(words)
    if stream is io.StringIO or width == 200:
        assert "│ token-token attention │ 114,759,400 │" in out.getvalue()
    elif width == 76:  # without lines between the columns it nearly fits
        assert "│" not in out.getvalue()
