"""Records are kept whole; tables, sentences and charts have what the rules of statistics say."""

import os
import re

import charts
import pandas as pd
import pytest
import report
import results

from tokenformer_vit.errors import InputError

ABOUT = {"sweep": "which", "title": "Which one?", "base": "base", "lr": 1e-3, "commit": "7e196e7"}
ABOUT |= {"torch": "2.14.1", "hardware": "2 cores", "dtype": "float32", "epochs": 2, "flops": 2e12}
ABOUT |= {"parameters": 5, "examples": 100, "batch_size": 4}
NINE = ("one", [10, 11, 12], {"compare": "two"}), ("two", [1, 2, 3], {})  # σ is 1, ± is 2.27


@pytest.fixture
def runs(tmp_path):
    """Returns a function that writes and reads runs: variants, results by seed, other columns."""

    def write(*groups):
        rows = [
            {**ABOUT, "variant": name, "label": name, "seed": seed, "top1": value, **own}
            for name, values, own in groups
            for seed, value in enumerate(values)
        ]
        pd.DataFrame(rows).to_csv(tmp_path / "results.csv", index=False)
        return results.read(tmp_path / "results.csv")

    return write


@pytest.fixture
def found(runs):
    """Returns a function that makes the sweeps of some groups."""
    return lambda *groups: report.sweeps(runs(*groups))


def test_sigma_is_pooled_and_a_family_counts_once_and_is_compared_by_seed(runs):
    rows = runs(("one", [1, 2, 3], {}), ("two", [2, 4, 6], {}))
    assert results.noise(rows) == (pytest.approx(2.5**0.5), 4)
    # Student's t at 97.5 % and four degrees of freedom is 2.7764.
    width = results.contrast(rows, {"one": 1, "two": -1}).width
    assert width == pytest.approx(2.7764 * (2.5 * 2 / 3) ** 0.5, rel=1e-4)
    family = {"family": "small"}
    rows = runs(
        ("small", [60, 70, 80], family),
        ("one", [10, 20, 30], family),
        ("two", [11, 21, 32], family),
        ("alone", [10, 20, 30], {}),
    )
    whole, degrees = results.noise(rows)
    assert degrees == 4  # two for the family
    # Two gains one more with the last seed: the squares of what is left add to (2/3)².
    assert results.paired_noise(rows) == (pytest.approx(1 / 3), 4)
    for weights, value, error in (
        ({"one": 1, "two": -1}, -4 / 3, 1 / 3 * (2 / 3) ** 0.5),
        ({"one": 1, "alone": -1}, 0, whole * (2 / 3) ** 0.5),
        ({"one": 1, "two": -1, "small": -1, "alone": 1}, -51.333, whole * (4 / 3) ** 0.5),
    ):
        assert results.contrast(rows, weights) == pytest.approx((value, error, 4), rel=1e-4)


@pytest.mark.parametrize(
    ("metric", "best", "at_end", "data", "counted"),
    [
        ("top1", 2e-3, False, "test", [7, 0]),
        ("perplexity", 1e-3, True, "test", [5, 6]),
        ("top1", 2e-3, False, "held-out", [0]),  # a run on held-out data only chooses
    ],
)
def test_seed_0_chooses_the_rate(runs, metric, best, at_end, data, counted):
    tried = {1e-3: [5, 6], 3e-3: [7, 9], 2e-3: [7, 0]}  # of equal ones, the lowest
    rows = runs(*(("one", own, {"lr": lr, "selected_on": data}) for lr, own in tried.items()))
    if metric == "perplexity":
        rows = rows.assign(perplexity=rows["top1"])
    chosen = results.at_best(rows)
    assert list(chosen[metric]) == counted
    assert {*chosen["lr"], *chosen["at_end"]} == {best, at_end}


def test_a_difference_is_bold_beyond_its_interval_unless_the_loser_has_a_star(found):
    assert report.table(found(*NINE)["which"]).splitlines() == [
        "|  | parameters | rate | epochs | 10¹² FLOPs | n | top-1 % | difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| one | 5 | 0.001 | 2 | 2 | 3 | 11.00 | **+9.00 ± 2.27** to two |",
        "| two | 5 | 0.001 | 2 | 2 | 3 | 2.00 |  |",
    ]
    near = found(("one", [3, 4, 5], {}), ("two", [1, 2, 3], {}))
    assert report.difference(near, "which one two") == "+2.00 ± 2.27"
    assert report.difference(found(("one", [1], {}), ("two", [5], {})), "which one two") == "−4.00"
    for name, value, text in (("one", 9, "**+9.00 ± 2.27**"), ("two", 0, "+9.00 ± 2.27")):
        starred = found(*NINE, (name, [value], {"lr": 2e-3}))
        assert report.difference(starred, "which one two") == text
    # A rate beside another sweep's: each has its own σ.
    two = found(*NINE, ("far", [4, 5, 6], {"sweep": "other"}))
    row = "| both | 11.00 | 5.00 | 3 | **+6.00 ± 3.51** |\n"
    assert report.differences(two, "A | B; which one other/far both").endswith(row)
    family = {"family": "same"}
    two = found(("one", [10, 11, 12], family), ("far", [4, 5, 7], {"sweep": "other", **family}))
    assert report.difference(two, "which one other/far") == "**+5.67 ± 1.43**"  # by seed


def test_a_stage_costs_what_it_starts_from_and_diverged_runs_are_told(found):
    after = ("after", [1, 2, None], {"start": "one"}), ("last", [1], {"start": "after"})
    sweep = found(*NINE, *after)["which"]
    assert sweep.flops.to_dict() == {"one": 2e12, "two": 2e12, "after": 4e12, "last": 6e12}
    assert sweep.number("after") == "2 of 3"
    assert report.cost({"which": sweep}, "which after / one two") == "1.00"


def test_verdicts_follow_the_records(found):
    def told(pairs, *groups):
        return report.verdict(found(*groups), f"this | that | {pairs}")

    assert told("which one two", *NINE) == "this leads that by 9.00 ± 2.27"
    assert told("which two one", *NINE) == "this is behind that by 9.00 ± 2.27"
    level = ("one", [2, 3, 4], {}), NINE[1]
    text = "no difference between this and that was found (+1.00 ± 2.27)"
    assert told("which one two", *level) == text
    mean = told("which one two, which two one", *level)
    assert mean == "no difference between this and that was found (+0.00 ± 1.60)"
    lower = [(name, values, {"perplexity": values[0], **own}) for name, values, own in NINE]
    assert told("which one two", *lower).startswith("this is behind that by 9.00")
    grown = [
        ("grown", [10, 11, 12], {"grown_to": 9, "compare": "large same twice"}),
        *(
            ("large", [1, 2, 3], {}),
            ("same", [20, 21, 22], {}),
            ("twice", [9] * 3, {"flops": 4e12}),
        ),
    ]
    assert report.tally(found(*grown), "which").endswith(
        "; 1 were worse, 0 of these perhaps for want of a better rate"
    )
    grown[2] = ("same", [2, 3, 4], {})
    assert report.tally(found(*grown), "which").startswith("of 1 grown models 1 beat the better")


def test_runs_are_appended_all_or_none_and_once(runs, tmp_path, monkeypatch):
    path, row = tmp_path / "new.csv", {**ABOUT, "variant": "one", "seed": 0, "top1": 50.25}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception, match="stopped"):
            results.append([row], path)
    assert not path.exists()
    results.append([row, {**row, "seed": 1, "speed": 1}], path)
    before = path.read_bytes()
    with pytest.raises(
        InputError, match=r"has a row of sweep which, variant one, lr 0.001, seed 1"
    ):
        results.append([{**row, "seed": 2}, {**row, "seed": 1}], path)
    assert path.read_bytes() == before
    assert list(results.read(path)["speed"].fillna(0)) == [0, 1]


def test_pages_say_what_the_records_say(found, tmp_path, monkeypatch):
    page = tmp_path / "README.md"
    page.write_text(
        "## The end: <!-- verdict one | two | which one two -->old<!-- end --> points\n"
        "<!-- differences A | B; which one two eight epochs -->\nold\n<!-- end -->\n"
        "<!-- mean which one -->old<!-- end -->, <!-- count x -->old<!-- end -->\n"
        "<!-- mean which one / two -->old<!-- end --> ×\n"
        "<!-- measured which -->\nold<!-- end -->\n"
    )
    rows, read = found(*NINE)["which"].rows, results.read
    monkeypatch.setattr(report, "TABLES", tmp_path / "TABLES.md")
    monkeypatch.setattr(report, "PAGES", (page,))
    monkeypatch.setattr(results, "read", lambda: rows)
    monkeypatch.setattr(charts, "draw", lambda found: None)
    monkeypatch.setattr("sys.argv", ["report.py"])
    report.main()
    text = page.read_text()
    assert "old" not in text
    assert "which one two -->one leads two by 9.00 ± 2.27<!-- end --> points" in text
    assert "| eight epochs | 11.00 | 2.00 | 3 | **+9.00 ± 2.27** |\n<!-- end -->" in text
    assert "-->11.00<!-- end -->, <!-- count x -->2 differences about 0<!-- end -->" in text
    assert "-->5.50<!-- end --> ×" in text
    assert "| `which` | `base` | one rate | 1 (4) |  | 2 cores, float32, batch 4 | 7e196e7" in text
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    report.main()
    rows.loc[rows["variant"] == "one", "top1"] -= 18
    with pytest.raises(SystemExit, match="is out of date: run python ablations/report"):
        report.main()
    monkeypatch.setattr("sys.argv", ["report.py", "--add", str(tmp_path / "more.csv")])
    rows.assign(sweep="more", commit="abc-dirty").to_csv(tmp_path / "more.csv", index=False)
    monkeypatch.setattr(results, "read", lambda path=None: rows if path is None else read(path))
    with pytest.raises(SystemExit, match="has rows of abc-dirty: commit the changes"):
        report.main()
    rows.assign(sweep="more").to_csv(tmp_path / "more.csv", index=False)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "kept.csv")
    report.main()
    assert "-->one is behind two by 9.00 ± 2.27<!-- end --> points" in page.read_text()
    assert len(read(tmp_path / "kept.csv")) == 6


def test_no_interval_of_the_pages_is_typed_by_hand():
    for page in report.PAGES:
        text = re.sub(r"-->.*?<!-- end -->", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert not re.findall(r"± \d.*", text)


def test_the_charts_of_the_repository_are_drawn(monkeypatch, tmp_path):
    rows = results.read()
    assert not rows.duplicated(results.RUN).any()
    (tmp_path / "figures").mkdir()
    monkeypatch.setattr(charts, "FOLDER", tmp_path)
    charts.draw(report.sweeps(rows))
    drawn, kept = tmp_path.glob("figures/*.png"), results.FOLDER.glob("figures/*.png")
    assert {path.name for path in drawn} == {path.name for path in kept}
