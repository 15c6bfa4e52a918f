"""The tables of benchmarking/README.md are what its records say."""

import json
import re
from pathlib import Path

import pytest

import tokenformer_vit

FOLDER = Path(tokenformer_vit.__file__).with_name("benchmarking")
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[.+\]\((.+)\), (\w+), (.+), batch (\d+) (\|.+)$", PAGE, re.MULTILINE)


def figures(record, mode, dtype, batch):
    """Return the cells of a row: the speeds of the baseline and of ours, and their ratio."""
    wanted = (mode, dtype, int(batch))
    groups = {(each["mode"], each["dtype"], each["batch_size"]): each for each in record["groups"]}
    rows = {row["variant"]: row for row in groups[wanted]["variants"]}
    how = "eager" if mode == "decode" else "compiled"  # decoding is never compiled
    ours = rows.get(f"auto {how}") or rows[f"fused {how}"]  # the name in earlier records
    speeds = [row[f"{record['unit']}s_per_s"] for row in (rows[f"baseline {how}"], ours)]
    cells = [f"{speed:,.0f}" if speed > 99 else f"{speed:.2f}" for speed in speeds]
    low, middle, high = (ours[f"ratio_p{point}"] for point in (20, 50, 80))
    return f"| {' | '.join(cells)} | {middle:.2f} ({low:.2f}–{high:.2f}) |"


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:4]) for row in ROWS])
def test_a_row_is_what_its_record_says(row):
    name, *group, cells = row
    record = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert cells == figures(record, *group)


def test_every_row_is_checked():
    assert len(ROWS) == PAGE.count("](results/speed_") == 14
