"""The records of experiments, and the statistics of their runs.

A row of ``results.csv`` is a run: ``sweep`` names the runs that are compared, ``family`` those that
share a past (a training before they part, a model that they go on from, or the order of a text in
one pass), ``start`` the variant that a run goes on from, ``compare`` the variants beside which a
table shows it. ``selected_on`` is "held-out" or "test" where seed 0 chose a rate on these data. A
run that diverged has a row without a result. ``config`` is a digest of the config.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from filelock import FileLock
from scipy.special import stdtrit

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.csv"
RUN = ["sweep", "variant", "lr", "seed"]  # the name of a run
TEXTS = ["sweep", "title", "question", "base", "options", "variant", "label", "family", "start"]
TEXTS += ["compare", "selected_on", "config", "commit", "torch", "date", "hardware", "cpu"]
TEXTS += ["dtype", "text"]
NUMBERS = ["lr", "seed", "epochs", "iterations", "batch_size", "examples", "parameters"]
NUMBERS += ["trainable", "grown_to", "flops", "seconds", "paper", "top1"]
LOWER = ("perplexity", "milliseconds")  # results that are better if lower


def read(path: Path = RESULTS) -> Any:
    """Read the rows; an empty cell is "" in columns of text, and NaN in the others."""
    rows, types = pd.DataFrame(), dict.fromkeys(TEXTS, str)
    if path.exists():
        rows = pd.read_csv(path, dtype=types, keep_default_na=False, na_values="")
    rows = rows.reindex(columns=[*dict.fromkeys([*TEXTS, *NUMBERS, *rows])])
    rows[TEXTS] = rows[TEXTS].fillna("").astype(str)
    return rows


def find(rows: Any, run: Mapping[str, Any]) -> Any:
    """Return the rows of a run."""
    return rows.loc[(rows[RUN] == pd.Series(run)[RUN]).all(axis=1)]


def append(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Add the rows of runs, all or none, also while other runs end.

    Raises:
        InputError: If a run has a row.
    """
    with FileLock(f"{path}.lock"):
        known = read(path)
        for row in rows:
            if not find(known, row).empty:
                name = ", ".join(f"{key} {row[key]}" for key in RUN)
                raise InputError(
                    f"{path} has a row of {name}: remove it, or name the sweep otherwise"
                )
        new = pd.DataFrame([*rows])
        if path.exists():
            new = pd.concat([pd.read_csv(path, dtype=str, keep_default_na=False), new])
        write_whole(path, new.to_csv(index=False).encode())


def metric_of(rows: Any) -> str:
    """Return the result that runs are compared by."""
    return next((m for m in LOWER if m in rows and rows[m].notna().any()), "top1")


def best_rates(rows: Any) -> Any:
    """Return the rate of each variant's best run; of equal ones, the lowest."""
    metric = metric_of(rows)
    ranked = rows.dropna(subset=[metric])
    ranked = ranked.sort_values([metric, "lr"], ascending=[metric in LOWER, True])
    return ranked.drop_duplicates("variant").set_index("variant")["lr"]


def at_best(rows: Any) -> Any:
    """Return the runs that count: those at the rate of their variant that seed 0 found the best.

    ``at_end`` tells whether this rate is the largest or the smallest of several that were tried.
    Runs that diverged count in ``tried``, the number of runs at this rate.
    """
    first = rows["seed"] == rows["seed"].min()
    best, names = best_rates(rows.loc[first]), rows["variant"]
    # A size of a nested model has the rate of all pairs: sandwich_25 that of sandwich.
    chosen = names.where(names.isin(best.index), names.str.rpartition("_")[0])
    rates = chosen.map(best).fillna(rows.groupby("variant")["lr"].transform("first"))
    tried = rows.groupby("variant")["lr"].agg(["min", "max"])
    least, most = chosen.map(tried["min"]), chosen.map(tried["max"])
    rows = rows.assign(at_end=((rates == least) | (rates == most)) & (least < most))
    rows = rows.loc[(rows["lr"] == rates) & ~(first & (rows["selected_on"] == "held-out"))]
    rows = rows.assign(tried=rows.groupby("variant")["seed"].transform("size"))
    return rows.dropna(subset=[metric_of(rows)])


class Estimate(NamedTuple):
    """A result or difference, and its standard error."""

    value: float
    error: float
    degrees: int  # of freedom

    @property
    def width(self) -> float:
        """Half width of the 95 % interval; NaN without a degree of freedom."""
        return float(stdtrit(self.degrees, 0.975)) * self.error

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.value) > self.width


def noise(best: Any) -> tuple[float, int]:
    """Pool the deviation of seeds over the variants of a sweep, with its degrees of freedom.

    A family counts once.
    """
    family = best["family"].where(best["family"] != "", best["variant"])
    groups = best.groupby([family.rename("of"), "variant"])[metric_of(best)]
    families = groups.agg(["var", "count"]).dropna().groupby("of").mean()
    degrees = families["count"] - 1
    total = degrees.sum()
    return float((families["var"] * degrees).sum() / max(total, 1)) ** 0.5, int(total)


def paired_noise(best: Any) -> tuple[float, int]:
    """Pool what is left of the deviation in families after their seeds.

    These are the residuals of ``variant + seed`` over the variants of a family.
    """
    squares, degrees = 0.0, 0
    for _, group in best[best["family"] != ""].groupby("family"):
        table = group.pivot(index="seed", columns="variant", values=metric_of(best)).dropna(axis=1)
        rest = table.sub(table.mean(axis=1), axis=0)
        squares += float(((rest - rest.mean()) ** 2).to_numpy().sum())
        degrees += max(table.shape[0] - 1, 0) * max(table.shape[1] - 1, 0)
    return (squares / max(degrees, 1)) ** 0.5, degrees


def contrast(best: Any, weights: Mapping[str, float]) -> Estimate:
    """Return a weighted sum of the means of variants.

    Where the weights of a family add to zero, its variants are compared seed by seed.
    """
    own: Any = best[best["variant"].isin([*weights])].set_index(["variant", "seed"])
    families = own.groupby("variant")["family"].first()
    value, variance, degrees = 0.0, 0.0, []
    for family in families.unique():
        names = [*families.index[families == family]]
        results = own.loc[names, metric_of(best)].unstack("variant")
        paired = family != "" and len(names) > 1 and abs(sum(weights[n] for n in names)) < 1e-9
        if paired:
            results = results.dropna()
        sigma, free = (paired_noise if paired else noise)(best)
        for name in names:
            value += weights[name] * results[name].mean()
            variance += (weights[name] * sigma) ** 2 / results[name].count()
        degrees.append(free)
    return Estimate(float(value), variance**0.5, min(degrees))


def together(estimates: Sequence[Estimate], degrees: int) -> Estimate:
    """Return the mean of several estimates, each weighted by its variance."""
    weights = [1 / each.error**2 for each in estimates]
    mean = sum(w * each.value for w, each in zip(weights, estimates, strict=True)) / sum(weights)
    return Estimate(mean, sum(weights) ** -0.5, degrees)


def paired(best: Any, other: Any) -> Estimate:
    """Return the mean difference of two variants of different sweeps, seed by seed."""
    one, two = (rows.set_index("seed")[metric_of(rows)] for rows in (best, other))
    steps = (one - two).dropna()
    return Estimate(steps.mean(), steps.std() / max(len(steps), 1) ** 0.5, len(steps) - 1)


def with_starts(best: Any) -> Any:
    """Return the mean FLOPs of each variant, with those of the models that it goes on from."""
    groups = best.groupby("variant")
    mean, start = groups["flops"].mean(), groups["start"].first()
    total, before = mean.copy(), start
    while before.isin(mean.index).any():
        total = total + before.map(mean).fillna(0)
        before = before.map(start).fillna("")
    return total
