"""The records of experiments, and the statistics of their runs.

A row of ``results.csv`` is a run: ``sweep`` names the runs that are compared, ``family`` those that
share a past (a training before they part, or a model that they go on from), ``start`` the variant
that a run goes on from, ``compare`` the variants beside which a table shows it. ``selected_on`` is
"held-out" or "test" where seed 0 chose a rate on these data. A run that diverged has a row without
a result. ``config`` is a digest of the config. ``curves.parquet`` has the validations of runs.
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
RESULTS, CURVES = FOLDER / "results.csv", FOLDER / "curves.parquet"
RUN = ["sweep", "variant", "lr", "seed"]  # the name of a run
TEXTS = ["sweep", "title", "question", "base", "options", "variant", "label", "family", "start"]
TEXTS += ["compare", "selected_on", "config", "commit", "torch", "date", "hardware", "cpu"]
TEXTS += ["dtype", "text"]


def read(path: Path = RESULTS) -> pd.DataFrame:
    """Read the rows; an empty cell is "" in columns of text, and NaN in the others."""
    if not path.exists():
        return pd.DataFrame(columns=[*TEXTS, "lr", "seed"])
    rows = pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str), keep_default_na=False, na_values="")
    return rows.fillna(dict.fromkeys(TEXTS, ""))


def find(rows: pd.DataFrame, run: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of a run."""
    return rows.loc[(rows[RUN] == pd.Series(run)[RUN]).all(axis=1)]


def append(row: Mapping[str, Any], curve: Mapping[int, float] | None = None, path: Any = RESULTS):
    """Add a run and its validations by iteration, whole or not at all, also while others end.

    Raises:
        InputError: If the run has a row.
    """
    curves = path.with_name(CURVES.name)
    new: Any = pd.DataFrame({"x": [*(curve or {})], "value": [*(curve or {}).values()]})
    new = new.assign(**{key: row[key] for key in RUN})
    with FileLock(f"{path}.lock"):
        if not find(read(path), row).empty:
            raise InputError(f"{path} has this run; remove its row: {[row[key] for key in RUN]}")
        rows = pd.DataFrame([row]).reindex(columns=[*dict.fromkeys([*TEXTS, *row])])
        if path.exists():
            rows = pd.concat([pd.read_csv(path, dtype=str, keep_default_na=False), rows])
        if curves.exists():  # a write that was interrupted between the two files left its curve
            known = pd.read_parquet(curves)
            new = pd.concat([known.drop(find(known, row).index), new])
        types = {"x": "int32", "seed": "int32", "value": "float32", "lr": "float64"}
        write_whole(curves, new.astype(types).to_parquet(index=False, compression="zstd"))
        write_whole(path, rows.to_csv(index=False).encode())


def metric_of(rows: pd.DataFrame) -> str:
    """Return the result that runs are compared by."""
    return "perplexity" if "perplexity" in rows and rows["perplexity"].notna().any() else "top1"


def sign_of(metric: str) -> int:
    """Return 1 if more is better, else −1."""
    return -1 if metric.startswith("perplexity") else 1


def best_rates(rows: pd.DataFrame) -> Any:
    """Return the rate of each variant's best run; of equal ones, the lowest."""
    metric = metric_of(rows)
    ranked = rows.dropna(subset=[metric])
    ranked = ranked.sort_values([metric, "lr"], ascending=[sign_of(metric) < 0, True])
    return ranked.drop_duplicates("variant").set_index("variant")["lr"]


def at_best(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that count: those at the rate of their variant that seed 0 found the best.

    ``at_end`` tells whether this rate is the largest or the smallest of several that were tried.
    Runs that diverged count in ``tried``, the number of runs at this rate.
    """
    first = rows["seed"] == rows["seed"].min()
    # A variant that seed 0 did not run has one rate, which another one chose.
    rates = rows["variant"].map(best_rates(rows.loc[first]))
    rates = rates.fillna(rows.groupby("variant")["lr"].transform("first"))
    tested: Any = rows.groupby("variant")["lr"]
    least, most = tested.transform("min"), tested.transform("max")
    rows = rows.assign(at_end=((rates == least) | (rates == most)) & (least < most))
    rows = rows.loc[(rows["lr"] == rates) & ~(first & (rows["selected_on"] == "held-out"))]
    rows = rows.assign(tried=rows.groupby("variant")["seed"].transform("size"))
    return rows.dropna(subset=[metric_of(rows)])


class Noise(NamedTuple):
    """Standard deviation of a run's result by its seed."""

    sigma: float
    degrees: int  # of freedom


class Estimate(NamedTuple):
    """A result or difference, and its standard error."""

    value: float
    error: float
    degrees: int

    @property
    def width(self) -> float:
        """Half width of the 95 % interval; NaN without a degree of freedom."""
        return float(stdtrit(self.degrees, 0.975)) * self.error

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return abs(self.value) > self.width


def noise(best: pd.DataFrame) -> Noise:
    """Pool the deviation of seeds over the variants of a sweep; a family counts once."""
    family = best["family"].where(best["family"] != "", best["variant"])
    groups = best.groupby([family.rename("of"), "variant"])[metric_of(best)]
    families = groups.agg(["var", "count"]).dropna().groupby("of").mean()
    degrees = families["count"] - 1
    total = degrees.sum()
    return Noise(float((families["var"] * degrees).sum() / max(total, 1)) ** 0.5, int(total))


def paired_noise(best: pd.DataFrame) -> Noise:
    """Pool what is left of the deviation in families after their seeds.

    These are the residuals of ``variant + seed`` over the variants of a family.
    """
    squares, degrees = 0.0, 0
    for _, group in best[best["family"] != ""].groupby("family"):
        table = group.pivot(index="seed", columns="variant", values=metric_of(best)).dropna(axis=1)
        rest = table.sub(table.mean(axis=1), axis=0)
        squares += float(((rest - rest.mean()) ** 2).to_numpy().sum())
        degrees += max(table.shape[0] - 1, 0) * max(table.shape[1] - 1, 0)
    return Noise((squares / max(degrees, 1)) ** 0.5, degrees)


def contrast(best: pd.DataFrame, weights: Mapping[str, float]) -> Estimate:
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


def together(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of several estimates, each weighted by its variance."""
    weights = [1 / each.error**2 for each in estimates]
    mean = sum(w * each.value for w, each in zip(weights, estimates, strict=True)) / sum(weights)
    return Estimate(mean, sum(weights) ** -0.5, sum(each.degrees for each in estimates))


def with_starts(best: pd.DataFrame, column: str = "flops") -> Any:
    """Return the mean of a cost of each variant, with that of what it goes on from."""
    groups = best.groupby("variant")
    mean, start = groups[column].mean(), groups["start"].first()
    total, before = mean.copy(), start
    while before.isin(mean.index).any():
        total = total + before.map(mean).fillna(0)
        before = before.map(start).fillna("")
    return total
