"""Render tables, verdicts and charts from the records.

python ablations/report.py           writes TABLES.md, what is between markers of pages, figures/
python ablations/report.py --check   fails if one of these texts is out of date

A page has markers such as ``<!-- difference theta gelu_l2 vit -->...<!-- end -->``; ``RENDER`` has
the kinds. Numbers and verbs stand between markers alone, so that they cannot leave their records.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import pandas as pd
import results
from results import FOLDER, Estimate

TABLES, PAGES = FOLDER / "TABLES.md", (FOLDER.parent / "README.md", FOLDER / "README.md")
INTRODUCTION = """# All tables

Rendered by `python ablations/report.py` from [results.csv](results.csv). A row is a variant at the
learning rate that seed 0 found best, over n seeds; `*`: no larger or smaller rate was tried, so a
better one may exist. Each sweep has one σ, the standard deviation of a run by its seed, pooled over
variants; those that share a past count once, and are compared seed by seed. ± is half the 95 %
interval of a difference, by Student's t. **Bold**: the interval excludes 0, and the loser's rate
has no `*`. FLOPs are those of all training, with the models that a row goes on from, but without
the pre-training of MAE. Minutes are those of machines that did other work.
"""


class Sweep:
    """The runs of one table."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.best = rows, results.at_best(rows)
        self.metric = results.metric_of(rows)
        self.sign = results.sign_of(self.metric)
        runs = self.best.groupby("variant", sort=False)
        self.first, self.means = runs.first(), runs.mean(numeric_only=True)
        self.flops, self.n = results.with_starts(self.best), runs.size()
        texts = self.best.filter(like="perplexity/").dropna(axis=1)
        whole = "all texts" if len(texts.columns) > 1 else self.metric.replace("top1", "top-1 %")
        # Column and heading of the result; that of each text follows, if there are several.
        self.metrics = {self.metric: whole}
        if len(texts.columns) > 1:
            self.metrics |= {each: each.removeprefix("perplexity/") for each in texts}

    def difference(
        self, one: str, other: str, their: "Sweep | None" = None
    ) -> tuple[Estimate, bool]:
        """Return the difference of two variants, and whether it is a verdict.

        A wider grid could only help the loser: if its rate is at the end of its grid, it is none.
        """
        their = their or self
        if their is self:
            found = results.contrast(self.best, {one: 1, other: -1})
        else:  # of different σ
            ours, theirs = (
                results.contrast(s.best, {n: 1}) for s, n in ((self, one), (their, other))
            )
            error, degrees = math.hypot(ours.error, theirs.error), min(ours.degrees, theirs.degrees)
            found = Estimate(ours.value - theirs.value, error, degrees)
        lost = (
            their.first["at_end"][other]
            if found.value * self.sign > 0
            else self.first["at_end"][one]
        )
        return found, found.clear and not lost

    def number(self, name: str) -> str:
        """Format the runs of a variant; those that diverged are missing."""
        tried = int(self.first["tried"][name])
        return f"{self.n[name]}" + (f" of {tried}" if tried > self.n[name] else "")


def interval(found: Estimate, bold: bool = False) -> str:
    """Format a difference with its interval, if there is one."""
    text = f"{found.value:+.2f}" + (f" ± {found.width:.2f}" if found.width >= 0 else "")
    text = text.replace("-", "−")
    return f"**{text}**" if bold else text


def sweeps(rows: pd.DataFrame) -> dict[str, Sweep]:
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


def table(sweep: Sweep) -> tuple[str, str]:
    """Render all variants of a sweep, and what is the same in all of its rows."""
    first, mean = sweep.first, sweep.means
    unit = "epochs" if first["epochs"].notna().any() else "iterations"
    columns = pd.DataFrame({"trained on": first["text"]})
    columns["parameters"] = texts(first["parameters"], "{:,.0f}")
    columns["parameters"] += texts(first["grown_to"], " → {:,.0f}")
    columns["trained parameters"] = texts(first["trainable"], "{:,.0f}")
    columns["rate"] = texts(first["lr"], "{:g}") + first["at_end"].map({True: "*", False: ""})
    columns[unit] = texts(first[unit], "{:,.0f}")
    columns["10¹² FLOPs"] = texts(sweep.flops / 1e12, "{:.3g}")
    columns["n"] = [sweep.number(name) for name in columns.index]
    columns["minutes"] = texts(mean["seconds"] / 60, "{:.1f}")
    one = columns.iloc[0]
    same = (columns == one).all() & ~one.str.contains("*", regex=False)
    shared = ", ".join(f"{key} {value}" for key, value in one[same].items() if value)
    columns = columns.loc[:, ~same]
    for metric, heading in sweep.metrics.items():
        columns[heading] = texts(mean[metric], "{:.2f}")
    columns["paper"] = texts(first["paper"], "{:g}")
    columns["difference"] = [
        "; ".join(
            f"{interval(*sweep.difference(name, other))} to {first['label'][other]}"
            for other in compare.split()
            if other in first.index
        )
        for name, compare in first["compare"].items()
    ]
    columns = columns.drop(
        columns=[key for key in ("paper", "difference") if not any(columns[key])]
    )
    columns.insert(0, "", first["label"])
    return markdown([*columns], columns.to_numpy().tolist()), shared


def caption(name: str, sweep: Sweep, shared: str) -> str:
    """Say how the runs of a table were made, and how far apart two means must be."""
    rows, one = sweep.rows, sweep.rows.iloc[0]
    text = f"**{name}** `{one['base']}`" + (f", `{one['options']}`" if one["options"] else "")
    text += f": {one['hardware']}, {one['dtype']}, {rows['examples'].max():,.0f} examples, "
    text += f"{one['batch_size']:.0f} a step, {shared}. "
    unit = "epochs" if rows["epochs"].notna().any() else "iterations"
    tried = rows.loc[rows["seed"] == rows["seed"].min(), unit].dropna()
    shorter = "".join(f" in {n:g} {unit}" for n in {*tried} - {*sweep.best[unit]})
    chosen = {"held-out": f"held-out training data{shorter}. "}
    chosen["test"] = "test data: seed 0's result chose and also counts. "
    chosen_on = [chosen[data] for data in rows["selected_on"].unique() if data]
    text += "".join(f"Rates were chosen on {data}" for data in chosen_on)
    n = int(sweep.n.min())
    for what, noise in (
        ("", results.noise(sweep.best)),
        (" inside a family", results.paired_noise(sweep.best)),
    ):
        if noise.degrees:
            width = Estimate(0, noise.sigma * (2 / n) ** 0.5, noise.degrees).width
            text += f"σ{what} {noise.sigma:#.2g} ({noise.degrees} degrees of freedom), "
            text += f"two means of {n} differ beyond {width:#.2g}. "
    commits, versions = "+".join(rows["commit"]).split("+"), rows["torch"].unique()
    text += f"Commit {', '.join(dict.fromkeys(commits))}; torch {', '.join(versions)}."
    mixed = len({*commits}) > 1 or len(versions) > 1 or "dirty" in "".join(commits)
    return text + (" **Not one commit, one torch and a clean tree.**" if mixed else "")


def tables(found: Mapping[str, Sweep]) -> str:
    """Render TABLES.md."""
    titles = {name: sweep.rows["title"].iloc[0] for name, sweep in found.items()}
    text = INTRODUCTION
    for title in dict.fromkeys(titles.values()):
        text += f"\n## {title}\n"
        for name in (name for name in found if titles[name] == title):
            body, shared = table(found[name])
            text += f"\n{caption(name, found[name], shared)}\n\n{body}"
    return text


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
    whole = each[0][0] if len(each) == 1 else results.together([own for own, _ in each])
    if not whole.clear or any(own.clear and not bold for own, bold in each):
        return f"no difference between {first} and {second} was found ({interval(whole)})"
    sign = found[pairs.split()[0]].sign
    verb = "leads" if whole.value * sign > 0 else "is behind"
    text = interval(whole._replace(value=abs(whole.value))).removeprefix("+")
    return f"{first} {verb} {second} by {text}"


def mean(found: Mapping[str, Sweep], words: str) -> str:
    """Render the mean result of a variant."""
    key, name = words.split()
    return f"{found[key].means[found[key].metric][name]:.2f}"


def cost(found: Mapping[str, Sweep], words: str) -> str:
    """Render the FLOPs of variants divided by those of others, from: sweep one ... / other ..."""
    key, names = words.split(maxsplit=1)
    one, other = (found[key].flops[each.split()].sum() for each in names.split("/"))
    return f"{one / other:.2f}"


def tally(found: Mapping[str, Sweep], words: str) -> str:
    """Count grown models against the better of their rivals, which have equal FLOPs."""
    total = ahead = behind = 0
    for sweep in (found[key] for key in words.split()):
        grown = sweep.first["grown_to"].notna()
        for name in grown.index[grown]:
            names = [each for each in sweep.first["compare"][name].split() if each in grown.index]
            costs = sweep.flops[names] / sweep.flops[name]
            rivals = [each for each in names if not grown[each] and abs(costs[each] - 1) < 0.11]
            if len(rivals) > 1:
                found_all = [sweep.difference(name, each)[0] for each in rivals]
                worst = min(found_all, key=lambda each: each.value * sweep.sign)
                total += 1
                ahead += worst.clear and worst.value * sweep.sign > 0
                behind += worst.clear and worst.value * sweep.sign < 0
    return (
        f"of {total} grown models {ahead or 'none'} beat the better of two rivals at equal FLOPs, a "
        f"large one from scratch and the small one trained longer; {behind} were worse than it"
    )


def contrast(found: Mapping[str, Sweep], words: str) -> str:
    """Render how two differences differ, from: sweep one other, one other."""
    key, one, two, three, four = words.replace(",", " ").split()
    own = results.contrast(found[key].best, {one: 1, two: -1, three: -1, four: 1})
    return interval(own, own.clear)


def converted(found: Mapping[str, Sweep], words: str) -> str:
    """Render what trained ViTs keep when they are converted; each ± is of its own seeds.

    From: a part of a model's name = heading; ...; name, dtype, variant = heading; ...
    """
    rows = pd.read_csv(FOLDER / "from_vit.csv", keep_default_na=False)
    pairs = [word.split("=") for word in " ".join(words.split()).split(";")]
    models = {part.strip(): heading.strip() for part, heading in pairs if "," not in part}
    lines = []
    for key, label in (pair for pair in pairs if "," in pair[0]):
        name, dtype, variant = (part.strip() for part in key.split(","))
        own = rows[(rows["name"] == name) & (rows["dtype"] == dtype) & (rows["variant"] == variant)]
        line = [label.strip()]
        for part in models:
            values = own.loc[own["model"].str.contains(part, regex=False), "value"].astype(float)
            error, degrees = values.std() / max(len(values), 1) ** 0.5, len(values) - 1
            width = Estimate(0, error, degrees).width if degrees > 0 else 0
            text = f"{values.mean():.4g}" if len(values) else ""
            line.append(text + (f" ± {width:.2g}" if width else ""))
        lines.append(line)
    return markdown(["", *models.values()], lines) if len(lines) > 1 else lines[0][1]


def measured(found: Mapping[str, Sweep], words: str) -> str:
    """Render how sweeps were made."""
    lines = []
    for name in words.split():
        sweep, one = found[name], found[name].best.iloc[0]
        unit = "epochs" if one["epochs"] == one["epochs"] else "iterations"
        search = sweep.rows[sweep.rows["seed"] == sweep.rows["seed"].min()][unit].min()
        chosen = {"": "one rate", "test": "test images", "held-out": "held-out data"}
        rates = chosen[one["selected_on"]] + f", {search:g} {unit}" * bool(one["selected_on"])
        n = "–".join(dict.fromkeys(f"{each}" for each in (sweep.n.min(), sweep.n.max())))
        sigma = f"{results.noise(sweep.best).sigma:.2g}"
        machine = f"{one['hardware']}, {one['dtype']}".replace(" (x86_64)", "")
        lines.append([f"`{name}`", f"`{one['base']}`", rates, n, sigma, machine])
    columns = ["sweep", "base", "rates chosen on", "n", "σ", "machine"]
    return markdown(columns, lines)


def record(found: Mapping[str, Sweep], words: str) -> str:
    """Render a number of a JSON file: its path, keys or places in lists, and a format."""
    path, *keys, form = words.split()
    value = json.loads((FOLDER.parent / path).read_text(encoding="utf-8"))
    for key in keys:
        value = value[int(key) if isinstance(value, list) else key]
    return form.format(value)


RENDER = (differences, difference, verdict, mean, cost, tally, contrast, converted)
RENDER += (measured, record)


def fill(text: str, found: Mapping[str, Sweep]) -> str:
    """Render what is between the markers of a page; ``count`` counts its differences."""
    kinds = {each.__name__: each for each in RENDER}

    def render(match: re.Match[str]) -> str:
        begin, kind, words, end = match.groups()
        return begin + kinds[kind](found, words) + end

    marked = r"(<!-- ({}) (.+?)-->\n?).*?(<!-- end -->)"
    text = re.sub(marked.format("|".join(kinds)), render, text, flags=re.DOTALL)
    number = text.count("±") - text.count("± is")
    counted = f"{number} differences; about {round(number / 20)} of them"
    return re.sub(marked.format("count"), rf"\g<1>{counted}\g<4>", text)


def main() -> None:
    """Write all files, or check those that are text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a text is out of date")
    check = parser.parse_args().check
    found = sweeps(results.read())
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
