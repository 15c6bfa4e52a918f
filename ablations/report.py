"""Render the tables and charts of ablations from ``results.csv``.

python ablations/report.py           writes TABLES.md, the tables of pages, and figures/
python ablations/report.py --check   fails if TABLES.md or a table of a page is out of date

Pages have tables between markers such as ``<!-- table softmax/cifar10_mini gelu_l2 vit -->``, of a
sweep (question and base) and its variants, and ``<!-- end -->``; and differences of two variants in
sentences, after ``<!-- difference softmax/cifar10_mini gelu_l2 vit -->``.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any

import pandas as pd
from results import FOLDER, SWEEP, Noise, at_best, difference, noise, paired_noise, read
from sweep import Question

TABLES = FOLDER / "TABLES.md"
PAGES = FOLDER.parent / "README.md", FOLDER / "README.md"
INTRODUCTION = """# Ablations

Rendered by `python ablations/report.py` from [results.csv](results.csv). A row is a variant at its
best learning rate, which seed 0 chose, over n seeds; `*` marks a rate at the end of its grid. Each
sweep has one σ, the standard deviation of a run by its seed, pooled over its variants. A ± is half
the 95 % interval that it gives, by Student's t. A difference beyond it is **bold**, if both rates
are inside their grids; where a caption does not say what chose the rates, each variant had only
one. Seeds are paired only where both variants go on from the same trained models. FLOPs of a stage
follow those of the models that it goes on from, without the pre-training of MAE. Minutes are those
of machines that did other work.
"""
SHORTER = ("cifar10_mini",)  # in results.csv alone: another base answers the same questions


class Sweep:
    """The runs of one table."""

    def __init__(self, question: Question, rows: Any) -> None:
        self.question, self.rows = question, rows
        self.best: Any = at_best(rows, question.metric)
        runs, known = self.best.groupby("variant"), {each.name: each for each in question.variants}
        # Those that have run, in the order of the question.
        self.variants = {name: known[name] for name in sorted(runs.groups, key=[*known].index)}
        self.means: Any = runs.mean(numeric_only=True)
        self.n = int(runs.size().min())  # the fewest seeds of a variant
        texts = self.best.filter(like="perplexity/").dropna(axis=1)
        # Column and heading of the result; that of each text follows, if there are several.
        whole = "all texts" if len(texts.columns) > 1 else question.metric
        self.metrics = {question.metric: whole.replace("top1", "top-1 %")}
        if len(texts.columns) > 1:
            self.metrics |= {each: each.removeprefix("perplexity/") for each in texts}

    def compared(self, one: str, other: str) -> str:
        """Format a difference: in bold beyond its interval, if no rate is at the end of a grid."""
        value, width = difference(self.best, one, other, self.question.metric)
        interval = f" ± {width:.2f}" if width >= 0 else ""  # NaN where each variant has one seed
        text = f"{value:+.2f}{interval}".replace("-", "−")
        at_end = self.best.loc[self.best["variant"].isin([one, other]), "at_end"].any()
        return f"**{text}**" if abs(value) > width and not at_end else text


def sweeps(rows: pd.DataFrame) -> dict[str, Sweep]:
    """Group the runs into sweeps, by question, base and options, in the order of the file."""
    asked, found, seen = questions(), {}, set()
    groups: Any = rows.groupby(SWEEP, sort=False)
    for (name, base, options), own in groups:
        key = f"{name}/{base}"
        seen.add(key := key + f"/{options.replace(' ', '/')}" * (key in seen))
        if not at_best(own, asked[name].metric).empty:  # its rates are still being chosen
            found[key] = Sweep(asked[name], own)
    return found


def questions() -> dict[str, Question]:
    """Import the questions of all files."""
    files = (path for path in FOLDER.glob("*.py") if "\nQUESTIONS" in path.read_text("utf-8"))
    return {each.name: each for path in files for each in import_module(path.stem).QUESTIONS}


def markdown(columns: pd.DataFrame) -> str:
    """Render a table of texts."""
    lines = [columns, ["---"] * columns.shape[1], *columns.to_numpy()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def texts(values: Any, form: str) -> Any:
    """Format numbers; a missing one is an empty cell."""
    return values.map(form.format).where(values.notna(), "")


def table(sweep: Sweep, names: Sequence[str], *, brief: bool = False) -> tuple[str, str]:
    """Render a table of some variants, and what is the same in all of its rows."""
    runs = sweep.best.groupby("variant")
    first, mean = runs.first().loc[names], sweep.means.loc[names]
    length = "epochs" if first["epochs"].notna().any() else "iterations"
    sizes = texts(first["parameters"], "{:,.0f}") + texts(first["grown_to"], " → {:,.0f}")
    columns = pd.DataFrame({"trained on": first["text"], "parameters": sizes})
    columns["trained parameters"] = texts(first["trainable"], "{:,.0f}")
    columns["rate"] = texts(first["lr"], "{:g}") + first["at_end"].map({True: "*", False: ""})
    columns[length] = texts(first[length], "{:,.0f}")
    flops = sweep.means["flops"] / 1e12
    spent, start, starts = texts(flops[names], "{:.3g}"), first["start"], runs["start"].first()
    while start.isin(flops.index).any():  # of the models that it goes on from
        spent, start = texts(start.map(flops), "{:.3g} + ") + spent, start.map(starts)
    columns["10¹² FLOPs"] = spent
    columns["n"] = texts(runs.size()[names], "{}")
    columns["minutes"] = texts(mean["seconds"] / 60, "{:.1f}")
    one = columns.iloc[0]
    same = (columns == one).all() & ~one.str.contains("*", regex=False)
    shared = ", ".join(f"{key} {value}" for key, value in one[same].items() if value)
    if sweep.means.filter(like="_at_").notna().any(axis=None):
        return sizes_table(sweep, names), shared
    columns = columns.loc[:, ~same]
    for metric, heading in sweep.metrics.items():
        columns[heading] = texts(mean[metric], "{:.2f}")
    variants = [sweep.variants[name] for name in names]
    columns["paper"] = [str(each.paper or "") for each in variants]
    columns["difference"] = [
        "; ".join(
            f"{sweep.compared(each.name, other)} to {sweep.variants[other].label}"
            for other in each.compare
            if other in names
        )
        for each in variants
    ]
    hidden = ["n", "minutes", "paper"] if brief else []
    hidden += [key for key in ("paper", "difference") if not any(columns[key])]
    columns.insert(0, "", [each.label for each in variants])
    return markdown(columns.drop(columns=hidden, errors="ignore")), shared


def by_size(sweep: Sweep, names: Sequence[str]) -> tuple[Any, Any]:
    """Return the mean of each way to get a model of a share of the pairs, and the way's FLOPs.

    A way is several variants with names such as ``alone_25``, or a variant that is measured at
    several sizes, in columns such as ``top1_at_0.25``.
    """
    values, costs = {}, {}
    for kind, how in (("top1", ""), ("pruned", ", pruned"), ("top_k", ", top-k")):
        for name in names:
            number, label = re.search(r"_(25|50|75|100)$", name), sweep.variants[name].label
            way, own = (label.rpartition(", ")[0], int(number[1]) / 100) if number else (label, 1)
            measured = sweep.means.loc[name].filter(regex=f"^{kind}(_at_|$)").dropna()
            for column, value in measured.items():
                values[way + how, float(column.partition("_at_")[2] or own)] = value
                costs[way + how, name] = sweep.means.loc[name, "flops"]
    flops = pd.Series(costs).groupby(level=0).sum()
    return pd.Series(values).unstack(sort=False).sort_index(axis=1), flops


def sizes_table(sweep: Sweep, names: Sequence[str]) -> str:
    """Render the results at each size; in bold where they differ from those of the first row.

    Nothing is in bold if a rate is at the end of its grid.
    """
    sizes, flops = by_size(sweep, names)
    at_end = sweep.best.loc[sweep.best["variant"].isin(names), "at_end"].any()
    width = math.inf if at_end else noise(sweep.best, "top1").half_width(sweep.n, sweep.n)
    bold = ((sizes - sizes.iloc[0]).abs() > width).map(lambda differs: "**" * differs)
    columns = (bold + sizes.map("{:.2f}".format, na_action="ignore") + bold).fillna("")
    columns = columns.rename(columns="top-1 % at {:g}".format)
    columns.insert(0, "10¹² FLOPs", texts(flops / 1e12, "{:.3g}"))
    return markdown(columns.reset_index(names=""))


def caption(sweep: Sweep, shared: str) -> str:
    """Say how the runs of a table were made, and how far apart two means must be."""
    rows, one, n = sweep.rows, sweep.rows.iloc[0], sweep.n
    text = f"`{one['base']}`" + (f", `{one['options']}`" if one["options"] else "")
    text += f": {one['hardware']}, {one['dtype']}, {rows['examples'].max():,.0f} examples, "
    text += f"{one['batch_size']:.0f} a step, {shared}. "
    unit = "epochs" if rows["epochs"].notna().any() else "iterations"
    tried = rows.loc[rows["seed"] == rows["seed"].min(), unit].dropna()
    shorter = "".join(f" in {n:g} {unit}" for n in {*tried} - {*sweep.best[unit]})
    chosen = {"held-out": f"held-out training data{shorter}. "}
    chosen["test"] = "test data: seed 0's result chose and also counts. "
    chosen_on = [chosen[data] for data in rows["selected_on"].unique() if data]
    text += "".join(f"Rates were chosen on {data}" for data in chosen_on)
    for metric, heading in sweep.metrics.items():
        for what, pooled in (("", noise), (" of runs from the same models", paired_noise)):
            if (own := pooled(sweep.best, metric)).degrees:
                text += f"σ of {heading}{what} {own.sigma:#.2g} ({own.degrees} degrees of "
                text += f"freedom), two means of {n} differ beyond {own.half_width(n, n):#.2g}. "
    commits = dict.fromkeys("+".join(rows["commit"]).split("+"))  # a resumed run may have two
    versions = rows["torch"].unique()
    text += f"Commit {', '.join(commits)}; torch {', '.join(versions)}."
    mixed = len(commits) > 1 or len(versions) > 1 or "dirty" in "".join(commits)
    return text + (" **Not one commit, one torch and a clean tree.**" if mixed else "")


def tables(found: Mapping[str, Sweep]) -> str:
    """Render TABLES.md."""
    text, title = INTRODUCTION, ""
    shown = [each for each in found.values() if each.rows["base"].iloc[0] not in SHORTER]
    titles = [each.question.title for each in shown]
    for sweep in sorted(shown, key=lambda each: titles.index(each.question.title)):
        if sweep.question.title != title:
            title = sweep.question.title
            text += f"\n## {title}\n{sweep.question.text.strip().splitlines()[0]}"
        body, shared = table(sweep, [*sweep.variants])
        text += f"\n{caption(sweep, shared)}\n\n{body}"
    return text


def differences(found: Mapping[str, Sweep], text: str) -> str:
    """Render the label, two variants of a sweep, n and difference of each line of a marker."""
    headings, *lines = text.strip().splitlines()
    rows = []
    for key, one, other, label in (line.split(maxsplit=3) for line in lines):
        sweep = found[key]
        stars = sweep.best.groupby("variant")["at_end"].first().map({True: "*", False: ""})
        means = texts(sweep.means[sweep.question.metric], "{:.2f}") + stars
        sizes = sweep.best["variant"].value_counts()
        n = "; ".join(dict.fromkeys(texts(sizes[[one, other]], "{}")))  # one, if both are equal
        rows.append((label, means[one], means[other], n, sweep.compared(one, other)))
    columns = ["", *map(str.strip, headings.split("|")), "n", "difference"]
    return markdown(pd.DataFrame(rows, columns=columns))


def converted(names: Sequence[str]) -> str:
    """Render what trained ViTs keep when they are converted; each ± is of its own seeds."""
    rows = pd.read_csv(FOLDER / "from_vit.csv").query("name in @names and part != 'train'")
    rows["name"] += ", " + rows["dtype"] + ", " + rows["variant"]

    def text(values: Any) -> str:
        width = Noise(values.std(), len(values) - 1).half_width(len(values))
        return f"{values.mean():.4g}" + (f" ± {width:.2g}" if width > 0 else "")

    cells = rows.pivot_table("value", "name", "model", aggfunc=text, sort=False, fill_value="")
    return markdown(cells.reset_index(names=""))


def smaller(words: Sequence[str]) -> str:
    """Render the accuracy of smaller ViTs, and what ``refit`` leads by, paired by seed.

    ``words`` are shares of the FLOPs, then methods. Sentences give the verdicts.
    """
    every: Any = pd.read_csv(FOLDER / "any_size.csv")
    rows = every.query("seed > 0")
    # A method may have a row without tuning, and another one with it.
    rows = rows.groupby(["seed", "method", "target"]).first().reset_index().set_index("seed")
    shares = [float(word) for word in words if word[0].isdigit()]
    methods = [word.replace("_", " ") for word in words[len(shares) :]]
    found, lines, verdicts = dict(list(rows.groupby(["target", "method"]))), [], {}
    for share, method in [(1.0, "whole"), *product(shares, methods)]:
        if (share, method) not in found:  # not run yet
            continue
        own, ours = found[share, method], found.get((share, "refit"))
        line = [f"{share:g}", method, f"{own['parameters'].mean() / 1e6:.1f} M", str(len(own))]
        for column, stage in (("top1", "Without training"), ("tuned", "After an epoch")):
            mean, text = own[column].mean(), ""
            gaps = None if ours is None else (ours[column] - own[column]).dropna()
            if gaps is not None and method != "refit" and len(gaps) > 1:
                text, verdict = lead(gaps)
                verdicts.setdefault((stage, verdict), []).append(f"{method} ({share:g})")
            line += ["" if math.isnan(mean) else f"{mean:.2f}", text]
        lines.append(line)
    columns = ["FLOPs", "method", "parameters", "n", "top-1 %", "refit leads by"]
    columns += ["after an epoch", "refit leads then by"]
    sentences = [f"{when}, *refit* {verb} {', '.join(m)}." for (when, verb), m in verdicts.items()]
    for share, first in every.query("seed == 0 and method in @methods").groupby("target"):
        best = first.groupby("method", sort=False)["tuned"].max().dropna()
        values = ", ".join(f"{method} {value:.1f}" for method, value in best.items())
        if values:
            where = f"on the {first['n'].iloc[0]:,} held-out images of seed 0, at {share:g}"
            sentences.append(f"After an epoch, {where}: {values} %.")
    shown = pd.DataFrame(lines, columns=columns)
    shown = shown.loc[:, (shown != "").any()]  # no column of what was not run
    return markdown(shown) + "\n" + "\n".join(sentences) + "\n"


def lead(gaps: Any) -> tuple[str, str]:
    """Format a difference that is paired by seed, and say what it shows."""
    mean, width = gaps.mean(), Noise(gaps.std(), len(gaps) - 1).half_width(len(gaps))
    text = f"{mean:+.2f} ± {width:.2f}".replace("-", "−")
    if abs(mean) > width:
        return f"**{text}**", "leads" if mean > 0 else "is behind"
    return text, "was not found to differ from"


def fill(text: str, found: Mapping[str, Sweep]) -> str:
    """Render what is between the markers of a page."""

    def render(match: re.Match[str]) -> str:
        begin, kind, words, end = match.groups()
        if kind == "differences":
            return begin + differences(found, words) + end
        if kind in ("converted", "smaller"):
            return begin + {"converted": converted, "smaller": smaller}[kind](words.split()) + end
        key, *names = words.split()
        if kind == "difference":
            return begin + found[key].compared(*names) + end
        return begin + table(found[key], names, brief=True)[0] + end

    marked = r"(<!-- (table|differences?|converted|smaller) (.+?)-->\n?).*?(<!-- end -->)"
    return re.sub(marked, render, text, flags=re.DOTALL)


def main() -> None:
    """Write all files, or check those that are text."""
    parser = argparse.ArgumentParser(description="Render tables and charts of ablations.")
    parser.add_argument("--check", action="store_true", help="fail if a table is out of date")
    check = parser.parse_args().check
    found = sweeps(read())
    pages = {page: fill(page.read_text(encoding="utf-8"), found) for page in PAGES}
    for path, text in {TABLES: tables(found), **pages}.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            if check:
                sys.exit(f"{path} is out of date: run python ablations/report.py")
            path.write_text(text, encoding="utf-8")
    if not check:
        import_module("charts").draw(found)


if __name__ == "__main__":
    main()
