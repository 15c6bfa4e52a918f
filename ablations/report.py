"""Render tables, verdicts and charts from the records.

python ablations/report.py             writes TABLES.md, what is between markers of pages, figures/
python ablations/report.py --check     fails if one of these texts is out of date
python ablations/report.py --add FILE  first takes over the rows of a sweep, of a clean commit

A page has markers such as ``<!-- difference theta gelu_l2 vit -->...<!-- end -->``; ``RENDER`` has
the kinds. Numbers and verbs stand between markers alone, so that they cannot leave their records.
"""

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import results
from results import FOLDER, Estimate

TABLES = FOLDER / "TABLES.md"
PAGES = [FOLDER.parent / part / "README.md" for part in ("", "ablations", "tokenformer_vit/growth")]
INTRODUCTION = """# All tables

Rendered by `python ablations/report.py` from [results.csv](results.csv). A row is a variant at the
learning rate that seed 0 found best, over n seeds; `*`: no larger or smaller rate was tried, so a
better one may exist. Where seed 0 chose on test data, it also counts. Each sweep has one σ, the
standard deviation of a run by its seed, pooled over variants (degrees of freedom in brackets);
those that share a past, or the order of a text in one pass, count once, and are compared seed by
seed, with a σ of their own. ± is half the 95 % interval of a difference, by Student's t. **Bold**:
the interval excludes 0, and the loser's rate has no `*`; where all variants have one rate, none
has. FLOPs are those of all training, with the variants that a row goes on from, but without the
pre-training of MAE and of weights that were read from a file. Minutes are those of machines that
did other work.
"""


class Sweep:
    """The runs of one table."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.best, self.metric = rows, results.at_best(rows), results.metric_of(rows)
        self.sign = -1 if self.metric in results.LOWER else 1  # of a difference that is a gain
        runs = self.best.groupby("variant", sort=False)
        self.first, self.means = runs.first(), runs.mean(numeric_only=True)
        self.flops, self.n = results.with_starts(self.best), runs.size()
        self.unit = "epochs" if rows["epochs"].notna().any() else "iterations"

    def difference(
        self, one: str, other: str, their: "Sweep | None" = None
    ) -> tuple[Estimate, bool]:
        """Return the difference of two variants, and whether it is a verdict.

        A wider grid could only help the loser: if its rate is at the end of its grid, it is none.
        """
        their = their or self
        ours, theirs = (s.best[s.best["variant"] == n] for s, n in ((self, one), (their, other)))
        families = {*ours["family"], *theirs["family"]}
        if their is self:
            found = results.contrast(self.best, {one: 1, other: -1})
        elif len(families) == 1 and "" not in families:
            found = results.paired(ours, theirs)
        else:  # of different σ
            first = results.contrast(self.best, {one: 1})
            second = results.contrast(their.best, {other: 1})
            error, degrees = math.hypot(first.error, second.error), min(first[2], second[2])
            found = Estimate(first.value - second.value, error, degrees)
        sweep, loser = (their, other) if found.value * self.sign > 0 else (self, one)
        return found, found.clear and not sweep.first["at_end"][loser]

    def number(self, name: str) -> str:
        """Format the runs of a variant; those that diverged are missing."""
        tried = int(self.first["tried"][name])
        return f"{self.n[name]}" + (f" of {tried}" if tried > self.n[name] else "")


def interval(found: Estimate, bold: bool = False) -> str:
    """Format a difference with its interval, if there is one."""
    text = f"{found.value:+.2f}" + (f" ± {found.width:.2f}" if found.width >= 0 else "")
    text = text.replace("-", "−")
    return f"**{text}**" if bold else text


def sweeps(rows: Any) -> dict[str, Sweep]:
    """Return the sweeps whose rates are chosen, in the order of the file."""
    groups = {str(name): Sweep(own) for name, own in rows.groupby("sweep", sort=False)}
    return {name: sweep for name, sweep in groups.items() if not sweep.best.empty}


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table of texts."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def texts(values: Any, form: str) -> Any:
    """Format numbers; a missing one is an empty cell."""
    return values.map(form.format).where(values.notna(), "")


def table(sweep: Sweep) -> str:
    """Render all variants of a sweep; a column without an entry is left out."""
    first, mean = sweep.first, sweep.means
    columns = pd.DataFrame({"": first["label"], "trained on": first["text"]})
    columns["parameters"] = texts(first["parameters"], "{:,.0f}")
    columns["parameters"] += texts(first["grown_to"], " → {:,.0f}")
    columns["trained"] = texts(first["trainable"], "{:,.0f}")
    columns["rate"] = texts(first["lr"], "{:g}") + first["at_end"].map({True: "*", False: ""})
    columns[sweep.unit] = texts(first[sweep.unit], "{:,.0f}")
    columns["10¹² FLOPs"] = texts(sweep.flops / 1e12, "{:.3g}")
    columns["n"] = [sweep.number(name) for name in columns.index]
    columns["minutes"] = texts(mean["seconds"] / 60, "{:.1f}")
    for metric in [sweep.metric, *mean.filter(like="perplexity/")]:
        columns[metric.replace("top1", "top-1 %")] = texts(mean[metric], "{:.2f}")
    columns["paper"] = texts(first["paper"], "{:g}")
    columns["difference"] = [
        "; ".join(
            f"{interval(*sweep.difference(name, other))} to {first['label'][other]}"
            for other in compare.split()
            if other in first.index
        )
        for name, compare in first["compare"].items()
    ]
    columns = columns.loc[:, (columns != "").any()]
    return markdown([*columns], columns.to_numpy().tolist())


def tables(found: Mapping[str, Sweep]) -> str:
    """Render TABLES.md."""
    titles = {name: sweep.rows["title"].iloc[0] for name, sweep in found.items()}
    text = INTRODUCTION
    for title in dict.fromkeys(titles.values()):
        names = [name for name in found if titles[name] == title]
        text += f"\n## {title}\n\n{measured(found, ' '.join(names))}"
        for name in names:
            text += f"\n**{name}**\n\n{table(found[name])}"
    return text


def measured(found: Mapping[str, Sweep], words: str) -> str:
    """Render how sweeps were made, and their σ with its degrees of freedom."""
    lines = []
    for name in words.split():
        sweep, one = found[name], found[name].best.iloc[0]
        rows, unit = sweep.rows, sweep.unit
        search = rows.loc[rows["seed"] == rows["seed"].min(), unit].min()
        chosen = {"": "one rate", "test": "test data", "held-out": "held-out data"}
        rates, unit = chosen[one["selected_on"]], unit if search > 1 else unit[:-1]
        rates += f", {search:g} {unit}" * bool(one["selected_on"])
        noises = results.noise(sweep.best), results.paired_noise(sweep.best)
        sigmas = [f"{sigma:.2g} ({free})" if free else "" for sigma, free in noises]
        base = f"`{one['base']}`" + f" `{one['options']}`" * bool(one["options"])
        machine = f"{one['hardware']}, {one['dtype']}, batch {one['batch_size']:.0f}"
        commits = [*dict.fromkeys("+".join(rows["commit"]).split("+")), *rows["torch"].unique()]
        lines.append([f"`{name}`", base, rates, *sigmas, machine, ", ".join(commits)])
    columns = ["sweep", "base", "rates chosen on", "σ", "in families", "machine", "commit, torch"]
    return markdown(columns, lines)


def places(found: Mapping[str, Sweep], words: str) -> list[tuple[Sweep, str]]:
    """Return two variants and their sweeps, from: sweep one other; other may be sweep/variant."""
    key, one, other = words.split()
    theirs, _, name = other.rpartition("/")
    return [(found[key], one), (found[theirs or key], name)]


def compared(found: Mapping[str, Sweep], words: str) -> tuple[Estimate, bool]:
    """Return the difference of two variants, and whether it is a verdict."""
    (sweep, one), (their, other) = places(found, words)
    return sweep.difference(one, other, their)


def differences(found: Mapping[str, Sweep], words: str) -> str:
    """Render a table, from: headings of both; sweep one other label; ..."""
    headings, *lines = words.split(";")
    rows = []
    for line in lines:
        *pair, label = " ".join(line.split()).split(maxsplit=3)
        both = places(found, " ".join(pair))
        stars = ["*" * bool(sweep.first["at_end"][name]) for sweep, name in both]
        means = [f"{sweep.means[sweep.metric][name]:.2f}" for sweep, name in both]
        n = "; ".join(dict.fromkeys(sweep.number(name) for sweep, name in both))
        cells = [mean + star for mean, star in zip(means, stars, strict=True)]
        rows.append((label, *cells, n, interval(*compared(found, " ".join(pair)))))
    return markdown(["", *map(str.strip, headings.split("|")), "n", "difference"], rows)


def difference(found: Mapping[str, Sweep], words: str) -> str:
    """Render the difference of two variants of a sweep."""
    return interval(*compared(found, words))


def verdict(found: Mapping[str, Sweep], words: str) -> str:
    """Render a sentence on the first of two, from: names | of both | sweep one other, ...

    Of several pairs it gives the mean, each weighted by its variance.
    """
    first, second, pairs = (word.strip() for word in words.split("|"))
    each = [compared(found, pair) for pair in pairs.split(",")]
    used = [found[pair.split()[0]] for pair in pairs.split(",")]
    whole = each[0][0]
    if len(each) > 1:  # each sweep's σ once
        degrees = sum(results.noise(sweep.best)[1] for sweep in dict.fromkeys(used))
        whole = results.together([own for own, _ in each], degrees)
    if not whole.clear:
        return f"no difference between {first} and {second} was found ({interval(whole)})"
    verb = "leads" if whole.value * used[0].sign > 0 else "is behind"
    text = interval(whole._replace(value=abs(whole.value))).removeprefix("+")
    star = any(own.clear and not bold for own, bold in each)
    return f"{first} {verb} {second} by {text}" + " (at the end of a grid of rates)" * star


def mean(found: Mapping[str, Sweep], words: str) -> str:
    """Render the mean result of a variant, perhaps divided: sweep one, or sweep one / other."""
    key, name, *other = words.replace("/", " ").split()
    metric = found[key].metric
    # Of times, the median of the ratios within a round is quoted.
    results = found[key].means["time_ratio" if other and metric == "milliseconds" else metric]
    return f"{results[name] / (results[other[0]] if other else 1):.2f}"


def cost(found: Mapping[str, Sweep], words: str) -> str:
    """Render the FLOPs of variants divided by those of others, from: sweep one ... / other ..."""
    key, names = words.split(maxsplit=1)
    one, other = (found[key].flops[each.split()].sum() for each in names.split("/"))
    return f"{one / other:.2f}"


def tally(found: Mapping[str, Sweep], words: str) -> str:
    """Count grown models against the better of their rivals, with equal FLOPs within 11 %."""
    total = ahead = behind = starred = 0
    for sweep in (found[key] for key in words.split()):
        grown = sweep.first["grown_to"].notna()
        for name in grown.index[grown]:
            names = [each for each in sweep.first["compare"][name].split() if each in grown.index]
            costs = sweep.flops[names] / sweep.flops[name]
            rivals = [each for each in names if not grown[each] and abs(costs[each] - 1) < 0.11]
            if len(rivals) > 1:
                gaps = [sweep.difference(name, each) for each in rivals]
                worst, bold = min(gaps, key=lambda gap: gap[0].value * sweep.sign)
                total += 1
                ahead += worst.clear and worst.value * sweep.sign > 0
                behind += worst.clear and worst.value * sweep.sign < 0
                starred += worst.clear and not bold
    return (
        f"of {total} grown models {ahead or 'none'} beat the better of two models of equal FLOPs, "
        f"a large one from scratch and the small one trained longer; {behind} were worse, "
        f"{starred} of these perhaps for want of a better rate"
    )


def contrast(found: Mapping[str, Sweep], words: str) -> str:
    """Render how two differences differ, from: sweep one other, one other."""
    key, one, two, three, four = words.replace(",", " ").split()
    own = results.contrast(found[key].best, {one: 1, two: -1, three: -1, four: 1})
    return interval(own, own.clear)


def converted(found: Mapping[str, Sweep], words: str) -> str:
    """Render a mean of from_vit.csv, from: part of a model's name, what, dtype, variant."""
    model, *names = (word.strip() for word in words.split(","))
    rows = pd.read_csv(FOLDER / "from_vit.csv")
    alike = (rows[["name", "dtype", "variant"]] == names).all(axis=1)
    return f"{rows['value'][alike & rows['model'].str.contains(model)].mean():.4g}"


RENDER = (differences, difference, verdict, mean, cost, tally, contrast, converted, measured)


def fill(text: str, found: Mapping[str, Sweep]) -> str:
    """Render what is between the markers of a page; ``count`` counts its differences."""
    kinds = {each.__name__: each for each in RENDER}

    def render(match: re.Match[str]) -> str:
        begin, kind, words, end = match.groups()
        return begin + kinds[kind](found, words) + end

    marked = r"(<!-- ({}) (.+?)-->\n?).*?(<!-- end -->)"
    text = re.sub(marked.format("|".join(kinds)), render, text, flags=re.DOTALL)
    number = text.count("±") - text.count("± is")
    counted = f"{number} differences about {round(number / 20)}"
    return re.sub(marked.format("count"), rf"\g<1>{counted}\g<4>", text)


def main() -> None:
    """Write all files, or check those that are text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a text is out of date")
    parser.add_argument("--add", type=Path, help="results.csv of a sweep; known rows are skipped")
    args = parser.parse_args()
    if args.add:
        rows = results.read(args.add)
        if dirty := [commit for commit in rows["commit"].unique() if "dirty" in commit]:
            sys.exit(f"{args.add} has rows of {dirty[0]}: commit the changes, and train again")
        known = results.read()[[*results.RUN, "config"]].to_dict("records")
        alike = rows[[*results.RUN, "config"]].to_dict("records")
        new = [each not in known for each in alike]
        results.append(rows[new].to_dict("records"), results.RESULTS)
    found = sweeps(results.read())
    pages = {page: fill(page.read_text(encoding="utf-8"), found) for page in PAGES}
    for path, text in {TABLES: tables(found), **pages}.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            if args.check:
                sys.exit(f"{path} is out of date: run python ablations/report.py")
            path.write_text(text, encoding="utf-8")
    if not args.check:
        import_module("charts").draw(found)


if __name__ == "__main__":
    main()
