"""Results are kept whole; tables have what the rules of statistics say."""

import os

import charts
import pandas as pd
import pytest
import report
import results
from sweep import Question, Variant

ABOUT = {"question": "which", "base": "base", "options": "", "lr": 1e-3, "commit": "7e196e7"}
ABOUT |= {"torch": "2.14.1", "date": "2026-11-26", "hardware": "2 cores, small", "dtype": "float32"}
ABOUT |= {"iterations": 10, "parameters": 5, "examples": 100, "batch_size": 4}
ONE = {**ABOUT, "variant": "one", "seed": 0}
NINE = ("one", [10, 11, 12], {}), ("two", [1, 2, 3], {})  # σ is 1, the interval ± 2.27
MIXED = "**Not one commit, one torch and a clean tree.**"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.csv"


@pytest.fixture
def runs(path):
    """Returns a function that writes and reads runs: variants, results by seed, other columns."""

    def write(*groups):
        rows = [
            {**ABOUT, "variant": variant, "seed": seed, "top1": value, **own}
            for variant, values, own in groups
            for seed, value in enumerate(values)
        ]
        columns = pd.read_csv(results.RESULTS, nrows=0).columns
        pd.DataFrame(rows, columns=columns).to_csv(path, index=False)
        return results.read(path)

    return write


@pytest.fixture
def sweep(runs, monkeypatch):
    """Returns a function that makes the sweep of some groups."""
    variants = (
        Variant("one", "first one", None, compare=("two",)),
        Variant("two", "other", None, paper=82.5),
        *(Variant(f"alone_{size}", f"alone, {size / 100:g}", None) for size in (50, 100)),
    )
    question = Question("which", "Which one?", "Which? Of two.\n\nMore.", variants)
    monkeypatch.setattr(report, "questions", lambda: {"which": question})
    return lambda *groups: report.sweeps(runs(*groups))["which/base"]


def test_sigma_is_pooled_over_variants(runs):
    rows = runs(("one", [1, 2, 3], {}), ("two", [2, 4, 6], {}))
    noise = results.noise(rows, "top1")
    assert noise == (pytest.approx(2.5**0.5), 4)
    # Student's t at 97.5 % and four degrees of freedom is 2.7764.
    assert noise.half_width(3, 3) == pytest.approx(2.7764 * (2.5 * 2 / 3) ** 0.5, rel=1e-4)
    expected = pytest.approx((-2, noise.half_width(3, 3)))
    assert results.difference(rows, "one", "two", "top1") == expected


def test_seeds_are_paired_only_after_the_same_models(runs):
    of_a_file = runs(*((name, values, {"start": "sha256:01"}) for name, values, _ in NINE))
    assert results.paired_noise(of_a_file, "top1").degrees == 0
    starts = ("small", [60, 70, 80], {}), ("one", [10, 20, 30], {"start": "small"})
    rows = runs(*starts, ("two", [11, 21, 32], {"start": "small"}))
    # The variance of the differences is 1/3, that of a run half of it; t at two degrees is 4.3027.
    expected = pytest.approx((-4 / 3, 4.3027 * (1 / 6 * 2 / 3) ** 0.5), rel=1e-4)
    assert results.difference(rows, "one", "two", "top1") == expected
    noise = results.noise(rows, "top1")
    assert noise.degrees == 2  # all three have the same three models
    assert results.difference(rows, "one", "small", "top1")[1] == noise.half_width(3, 3)
    chain = runs(*starts, ("two", [11, 21, 32], {"start": "one"}))
    assert results.noise(chain, "top1").degrees == 2


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
    chosen = results.at_best(rows.assign(perplexity=rows["top1"]), metric)
    assert list(chosen[metric]) == counted
    assert {*chosen["lr"], *chosen["at_end"]} == {best, at_end}


def test_a_difference_is_bold_beyond_its_interval_and_inside_the_grid(sweep):
    assert report.table(sweep(*NINE), ["one", "two"])[0].splitlines() == [
        "|  | top-1 % | paper | difference |",
        "| --- | --- | --- | --- |",
        "| first one | 11.00 |  | **+9.00 ± 2.27** to other |",
        "| other | 2.00 | 82.5 |  |",
    ]
    near = sweep(("one", [3, 4, 5], {}), ("two", [1, 2, 3], {}))
    assert near.compared("one", "two") == "+2.00 ± 2.27"
    assert sweep(("one", [1], {}), ("two", [5], {})).compared("one", "two") == "−4.00"
    tried = sweep(*NINE, ("one", [9], {"lr": 2e-3}))
    assert tried.compared("one", "two") == "+9.00 ± 2.27"
    assert "| first one | 0.001* | 11.00 |" in report.table(tried, ["one", "two"])[0]
    row = "| both | 11.00* | 2.00 | 3 | +9.00 ± 2.27 |\n"
    assert report.differences({"which": tried}, "A | B\nwhich one two both").endswith(row)
    more = sweep(*NINE, ("one", [11], {"seed": 3}))
    assert "| 2.00 | 4; 3 |" in report.differences({"which": more}, "A | B\nwhich one two both")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"commit": "89ba24c"}, MIXED),
        ({"commit": "7e196e7-dirty"}, MIXED),
        ({"commit": "7e196e7+89ba24c"}, MIXED),
        ({"torch": "2.15.0"}, MIXED),
        ({"selected_on": "test"}, "Rates were chosen on test data: seed 0's result chose and also"),
        ({"selected_on": "held-out"}, "Rates were chosen on held-out training data."),
    ],
)
def test_a_caption_tells_how_runs_were_made(sweep, other, words):
    plain = report.caption(sweep(*NINE), "n 3")
    assert "σ of top-1 % 1.0 (4 degrees of freedom), two means of 3 differ beyond 2.3." in plain
    assert words not in plain
    assert words in report.caption(sweep(NINE[0], ("two", [1, 2, 3], other)), "")


def test_a_sweep_has_a_table_once_its_rates_are_chosen(sweep, runs):
    choosing = ("one", [1], {"selected_on": "held-out"})
    assert report.sweeps(runs(choosing)) == {}
    assert list(sweep(choosing, ("two", [1, 2], {})).variants) == ["two"]


def test_ways_to_get_a_size(sweep):
    sizes = {"top1_at_0.5": 70, "pruned_at_0.5": 20, "flops": 3e12}
    names, values = ["alone_50", "alone_100", "one"], ([50, 51], [90, 91], [92, 93])
    made = sweep(*zip(names, values, ({}, {}, sizes), strict=True))
    assert report.table(made, names)[0].splitlines()[2:] == [
        "| alone | 0 | 50.50 | 90.50 |",
        "| first one | 3 | **70.00** | 92.50 |",
        "| first one, pruned | 3 | **20.00** |  |",
    ]
    made.best.loc[made.best["variant"] == "one", "at_end"] = True
    assert "**" not in report.table(made, names)[0]


def test_a_run_is_appended_whole_or_not_at_all_and_once(runs, path, monkeypatch):
    curves = path.with_name("curves.parquet")
    curve = pd.DataFrame({"kind": "loss", "x": [1, 2], "value": [0.5, 0.25], "layer": ""})
    row = {**ONE, "top1": 50.25, "also": "that/a this/b"}
    calls = iter([os.replace, lambda *paths: pytest.fail("stopped")])
    monkeypatch.setattr(os, "replace", lambda *paths: next(calls)(*paths))
    with pytest.raises(pytest.fail.Exception, match="stopped"):
        results.append(row, curve, path)
    assert not path.exists()
    monkeypatch.undo()
    results.append(row, curve, path)
    assert list(pd.read_parquet(curves)["value"]) == [0.5, 0.25]
    rows, before = results.read(path), path.read_bytes()
    assert list(rows["question"] + "/" + rows["variant"]) == ["which/one", "that/a", "this/b"]
    assert list(rows.index) == [0, 0, 0]
    assert {key: rows.iloc[0][key] for key in row} == row
    with pytest.raises(ValueError, match="already has this run"):
        results.append(row, curve, path)
    assert path.read_bytes() == before
    results.append({**row, "seed": 1, "speed": 1}, curve, path)
    lines = before.decode().splitlines()
    assert path.read_text().splitlines()[:2] == [f"{lines[0]},speed", f"{lines[1]},"]


def test_tables_are_written_and_checked(sweep, path, monkeypatch, tmp_path):
    sweep(*NINE)
    tables, page = tmp_path / "TABLES.md", tmp_path / "README.md"
    page.write_text(
        "Before\n<!-- table which/base two -->\nold\n<!-- end -->\n"
        "By <!-- difference which/base one two -->old<!-- end --> points.\n"
        "<!-- differences A | B\nwhich/base one two eight epochs\n-->\n<!-- end -->\n"
    )
    monkeypatch.setattr(report, "TABLES", tables)
    monkeypatch.setattr(report, "PAGES", (page,))
    monkeypatch.setattr(report, "read", lambda: results.read(path))
    monkeypatch.setattr(charts, "draw", lambda found: None)
    monkeypatch.setattr("sys.argv", ["report.py"])
    report.main()
    assert "## Which one?\nWhich? Of two.\n`base`: 2 cores, small, float32" in tables.read_text()
    assert "old" not in page.read_text()
    row = "| eight epochs | 11.00 | 2.00 | 3 | **+9.00 ± 2.27** |\n"
    assert page.read_text().endswith(f"{row}<!-- end -->\n")
    assert "one two -->**+9.00 ± 2.27**<!-- end --> points.\n" in page.read_text()
    monkeypatch.setattr("sys.argv", ["report.py", "--check"])
    report.main()
    tables.write_text(tables.read_text().replace("11.00", "12.00"))
    with pytest.raises(SystemExit, match=r"TABLES.md is out of date: run python ablations/report"):
        report.main()


def test_the_charts_of_the_repository_are_drawn(monkeypatch, tmp_path):
    rows = results.read()
    assert not rows.duplicated(results.RUN).any()
    curves = pd.read_parquet(results.CURVES)[results.RUN].drop_duplicates()
    assert len(curves.merge(rows, on=results.RUN)) == len(curves)
    (tmp_path / "figures").mkdir()
    monkeypatch.setattr(charts, "FOLDER", tmp_path)
    charts.draw(report.sweeps(rows))
    drawn, kept = tmp_path.glob("figures/*.png"), results.FOLDER.glob("figures/*.png")
    assert {path.name for path in drawn} == {path.name for path in kept}
