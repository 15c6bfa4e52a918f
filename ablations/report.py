"""Render the tables and charts of ablations from ``results.csv``.

python ablations/report.py           writes TABLES.md, the tables of pages, and figures/
python ablations/report.py --check   fails if TABLES.md or a table of a page is out of date

Pages have tables between markers such as ``<!-- table softmax/cifar10_mini gelu_l2 vit -->`` and
``<!-- end -->``: a question and a base, which is a sweep, and its variants.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from results import FOLDER, SWEEP, Noise, at_best, difference, noise, paired_noise, read

if TYPE_CHECKING:
    from sweep import Question

TABLES = FOLDER / "TABLES.md"
PAGES = FOLDER.parent / "README.md", FOLDER / "README.md"
INTRODUCTION = """# Ablations

Rendered by `python ablations/report.py` from [results.csv](results.csv), which has every run. A row
is a variant at its best learning rate, which seed 0 chose. `*` marks a rate at the end of its grid.

Results are means over n seeds. Each sweep has one σ, the standard deviation of a run by its seed,
pooled over its variants. A ± is half the 95 % interval that it gives, by Student's t. A difference
beyond it is **bold**, if both rates are inside their grids. Seeds are paired only where both
variants go on from the same trained models. FLOPs are those of one training, or of one stage;
minutes are those of machines that did other work; perplexity is of held-out text.
"""


class Sweep(NamedTuple):
    """The runs of one table."""

    question: "Question"
    rows: Any  # DataFrame of all runs
    best: Any  # of those at the best rate of their variant

    @property
    def names(self) -> list[str]:
        """Names of the variants that have run, in the order of the question."""
        order = {each.name: place for place, each in enumerate(self.question.variants)}
        return sorted(self.best["variant"].unique(), key=lambda name: order.get(name, len(order)))

    @property
    def metrics(self) -> dict[str, str]:
        """Columns of the results and their headings: one, or one for each of several texts."""
        found = self.best.filter(like="perplexity/").dropna(axis=1)
        texts = {name: name.removeprefix("perplexity/") for name in found}
        metric = self.question.metric
        return texts if len(texts) > 1 else {metric: metric.replace("top1", "top-1 %")}

    @property
    def means(self) -> Any:
        """Mean result of each variant."""
        return self.best.groupby("variant")[self.question.metric].mean()

    @property
    def seeds(self) -> int:
        """Number of seeds of most variants."""
        return int(self.best.groupby("variant").size().mode().max())

    def label(self, name: str) -> str:
        """Return the label of a variant; one that the question no longer has keeps its name."""
        return {each.name: each.label for each in self.question.variants}.get(name, name)

    def compared(self, one: str, other: str) -> str:
        """Format a difference: in bold beyond its interval, if no rate is at the end of a grid."""
        value, width = difference(self.best, one, other, self.question.metric)
        text = f"{value:+.2f} ± {width:.2f}".replace("-", "−")
        at_end = self.best.loc[self.best["variant"].isin([one, other]), "at_end"].any()
        return f"**{text}**" if abs(value) > width and not at_end else text


def sweeps(rows: pd.DataFrame) -> dict[str, Sweep]:
    """Group the runs into sweeps, by question, base and options, in the order of the file."""
    asked, found = questions(), {}
    for about, own in rows.groupby(SWEEP, sort=False):
        name, base, options = map(str, about)  # type: ignore[arg-type]
        question, key = asked[name], f"{name}/{base}"
        best = at_best(own, question.metric, higher=question.higher_is_better)
        key = f"{key}/{options.replace(' ', '/')}" if key in found else key
        found[key] = Sweep(question, own, best)
    return found


def questions() -> dict[str, "Question"]:
    """Import the questions of all files."""
    asked = {}
    for path in sorted(FOLDER.glob("*.py")):
        if re.search("^QUESTIONS", path.read_text(encoding="utf-8"), re.MULTILINE):
            asked |= {each.name: each for each in import_module(path.stem).QUESTIONS}
    return asked


def markdown(columns: Mapping[str, Iterable[str]]) -> str:
    """Render a table from its columns by heading."""
    lines = [columns, ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(values: Any, form: str) -> list[str]:
    """Format numbers; a missing one is an empty cell."""
    return ["" if value != value else form.format(value) for value in values]


def table(sweep: Sweep, names: Sequence[str], *, brief: bool = False) -> tuple[str, str]:
    """Render a table of some variants, and what is the same in all of its rows."""
    runs = sweep.best.groupby("variant")
    first, mean = runs.first().loc[names], runs.mean(numeric_only=True).loc[names]
    length = "epochs" if first["epochs"].notna().any() else "iterations"
    ends = first["at_end"].map({True: "*", False: ""})
    sizes = cells(first["parameters"], "{:,.0f}"), cells(first["grown_to"], " → {:,.0f}")
    columns = {
        "trained on": cells(first["text"], "{}"),
        "parameters": list(map("".join, zip(*sizes, strict=True))),
        "trained parameters": cells(first["trainable"], "{:,.0f}"),
        "rate": list(first["lr"].map("{:g}".format) + ends),
        length: cells(first[length], "{:,.0f}"),
        "10¹² FLOPs": cells(mean["flops"] / 1e12, "{:.3g}"),
        "n": cells(runs.size().loc[names], "{}"),
        "minutes": cells(mean["seconds"] / 60, "{:.1f}"),
    }
    hidden = ("n", "minutes") if brief else ()
    same = {key: own[0] for key, own in columns.items() if len({*own}) == 1 and "*" not in own[0]}
    columns = {key: own for key, own in columns.items() if key not in (*same, *hidden)}
    columns |= {key: cells(mean[name], "{:.2f}") for name, key in sweep.metrics.items()}
    own = {each.name: each for each in sweep.question.variants if each.name in names}
    if not brief and any(each.paper for each in own.values()):
        columns["paper"] = [str(own[name].paper or "") for name in names]
    pairs = {name: [o for o in own[name].compare if o in names] for name in own}
    if any(pairs.values()):
        columns["difference"] = [
            "; ".join(f"{sweep.compared(name, o)} to {sweep.label(o)}" for o in pairs.get(name, ()))
            for name in names
        ]
    shared = ", ".join(f"{key} {value}" for key, value in same.items() if value)
    return markdown({"": [sweep.label(name) for name in names], **columns}), shared


def by_size(sweep: Sweep, names: Sequence[str]) -> tuple[Any, Any]:
    """Return the mean of each way to get a model of a share of the pairs, and the way's FLOPs.

    A way is several variants with names such as ``alone_25``, or a variant that is measured at
    several sizes, in columns such as ``top1_at_0.25``.
    """
    own = sweep.best[sweep.best["variant"].isin(names)]
    measured = own.filter(regex="^(top1|pruned|top_k)(_at_.+)?$")
    long = own.melt(["variant", "flops"], list(measured)).dropna(subset=["value"])
    how = long["variable"].str.extract("^(.+?)(?:_at_(.+))?$")
    share = long["variant"].str.extract("_(25|50|75|100)$")[0].astype(float) / 100
    label = long["variant"].map(sweep.label)
    way = label.where(share.isna(), label.str.rpartition(", ")[0])
    long["way"] = way + how[0].map({"top1": "", "pruned": ", pruned", "top_k": ", top-k"})
    long["size"] = how[1].astype(float).fillna(share).fillna(1)
    flops = long.groupby(["way", "variant"])["flops"].mean().groupby("way").sum()
    return long.pivot_table("value", "way", "size", sort=False), flops


def sizes_table(sweep: Sweep, names: Sequence[str]) -> str:
    """Render the results at each size; in bold where they differ from those of the first row."""
    sizes, flops = by_size(sweep, names)
    width = noise(sweep.best, "top1").half_width(sweep.seeds, sweep.seeds)
    columns = {"": list(sizes.index), "10¹² FLOPs": cells(flops[sizes.index] / 1e12, "{:.3g}")}
    for size, values in sizes.items():
        bold = ["**" * b for b in (values - values.iloc[0]).abs() > width]
        both = zip(cells(values, "{:.2f}"), bold, strict=True)
        columns[f"top-1 % at {size:g}"] = [f"{mark}{text}{mark}" for text, mark in both]
    return markdown(columns)


def caption(sweep: Sweep, shared: str) -> str:
    """Say how the runs of a table were made, and how far apart two means must be."""
    rows, one, n = sweep.rows, sweep.rows.iloc[0], sweep.seeds
    text = f"`{one['base']}`" + (f", `{one['options']}`" if one["options"] else "")
    text += f": {one['hardware']}, {one['dtype']}, {rows['examples'].max():,.0f} examples, "
    text += f"{one['batch_size']:.0f} a step, {shared}. "
    chosen = {"": "", "held-out": "Rates were chosen on held-out training data. "}
    chosen["test"] = "Rates were chosen on test data: seed 0's result chose and also counts. "
    text += "".join(chosen[data] for data in rows["selected_on"].unique())
    for name, heading in sweep.metrics.items():
        for what, pooled in (("", noise), (" of runs from the same models", paired_noise)):
            if (own := pooled(sweep.best, name)).degrees:
                text += f"σ of {heading}{what} {own.sigma:#.2g} ({own.degrees} degrees of freedom)"
                text += f", two means of {n} differ beyond {own.half_width(n, n):#.2g}. "
    commits = dict.fromkeys("+".join(rows["commit"]).split("+"))  # a resumed run may have two
    versions = rows["torch"].unique()
    text += f"Commit {', '.join(commits)}; torch {', '.join(versions)}."
    mixed = len(commits) > 1 or len(versions) > 1 or "dirty" in "".join(commits)
    return text + (" **Not one commit, one torch and a clean tree.**" if mixed else "")


def tables(found: Mapping[str, Sweep]) -> str:
    """Render TABLES.md."""
    text, title = INTRODUCTION, ""
    for sweep in found.values():
        if sweep.question.title != title:
            title = sweep.question.title
            asked = sweep.question.text.strip().partition("\n\n")[0]
            text += f"\n## {title}\n{' '.join(asked.split())}"
        body, shared = table(sweep, sweep.names)
        if sweep.best.filter(like="_at_").notna().any(axis=None):
            body = sizes_table(sweep, sweep.names)
        text += f"\n{caption(sweep, shared)}\n\n{body}"
    return text


def differences(found: Mapping[str, Sweep], text: str, folder: Path) -> str:
    """Render two variants and their difference a row, with a link to their table."""
    headings, *lines = text.splitlines()
    rows = [["", *map(str.strip, headings.split("|")), "difference"]]
    for key, one, other, label in (line.split(maxsplit=3) for line in lines):
        sweep = found[key]
        anchor = re.sub(r"[^\w\- ]", "", sweep.question.title).lower().replace(" ", "-")
        link = f"[{label}]({Path(os.path.relpath(TABLES, folder)).as_posix()}#{anchor})"
        rows.append([link, *cells(sweep.means[[one, other]], "{:.2f}"), sweep.compared(one, other)])
    return markdown({column[0]: column[1:] for column in zip(*rows, strict=True)})


def converted(names: Sequence[str] = (), path: Path = FOLDER / "from_vit.csv") -> str:
    """Render what trained ViTs keep when they are converted; each ± is of its own seeds."""
    rows: Any = pd.read_csv(path)
    rows["name"] = rows["name"].str.partition(" data ")[0]
    rows = rows[rows["name"].isin(names or rows["name"]) & (rows["part"] != "train")]
    rows["what"] = rows["name"] + ", " + rows["dtype"] + ", " + rows["variant"]
    seeds = rows.groupby(["what", "model", "seed"], sort=False)["value"].mean()
    stats = seeds.groupby(["what", "model"], sort=False).agg(["mean", "std", "count"])
    texts = {}
    for key, mean, std, count in stats.itertuples():
        width = Noise(std, count - 1).half_width(count)
        text = f"{mean:.4g}" if mean < 1e5 else f"{mean:,.0f}"
        texts[key] = f"{text} ± {width:.2g}" if width > 0 else text
    columns = pd.Series(texts).unstack(sort=False).fillna("")
    return markdown({"": list(columns.index), **{name: columns[name] for name in columns}})


def fill(text: str, found: Mapping[str, Sweep], folder: Path) -> str:
    """Render the tables between the markers of a page."""

    def render(match: re.Match[str]) -> str:
        key, *names = match[3].split()
        kinds = {
            "table": lambda: table(found[key], names, brief=True)[0],
            "sizes": lambda: sizes_table(found[key], names),
            "differences": lambda: differences(found, match[3].strip(), folder),
            "converted": lambda: converted([key, *names]),
        }
        return f"{match[1]}{kinds[match[2]]()}{match[4]}"

    marked = r"(<!-- (table|sizes|differences|converted) (.+?)-->\n).*?(<!-- end -->)"
    return re.sub(marked, render, text, flags=re.DOTALL)


def main() -> None:
    """Write all files, or check those that are text."""
    parser = argparse.ArgumentParser(description="Render tables and charts of ablations.")
    parser.add_argument("--check", action="store_true", help="fail if a table is out of date")
    check = parser.parse_args().check
    found = sweeps(read())
    texts = {TABLES: tables(found)}
    texts |= {page: fill(page.read_text(encoding="utf-8"), found, page.parent) for page in PAGES}
    for path, text in texts.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            if check:
                sys.exit(f"{path} is out of date: run python ablations/report.py")
            path.write_text(text, encoding="utf-8")
    if not check:
        import_module("charts").draw(found)


if __name__ == "__main__":
    main()
