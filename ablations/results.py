"""The results of ablations: a row of ``results.csv`` is a run; its curves are in another file.

Columns that are not what they seem: ``also`` names other questions and variants that the run
answers; ``start`` is the variant from which it goes on; ``selected_on`` is empty where no rate was
chosen, else what seed 0 chose it on: "test", or "held-out", and then seed 0 is measured there;
``seconds`` is empty for a run that was interrupted; perplexities are of held-out text; ``config``
is a digest of the config, without which a run is never taken for finished.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from filelock import FileLock
from scipy.special import stdtrit

from tokenformer_vit.files import write_whole

FOLDER = Path(__file__).parent
RESULTS, CURVES = FOLDER / "results.csv", FOLDER / "curves.parquet"
SWEEP = ["question", "base", "options"]  # the runs of one table; options: --cfg-options
RUN = [*SWEEP, "variant", "lr", "seed"]  # the name of a run
_ABOUT = ["commit", "torch", "date", "hardware", "cpu", "dtype", "text", "selected_on", "config"]
_TEXTS = [*SWEEP, "variant", "also", "start", *_ABOUT]  # 7e196e7 is a commit


def read(path: Path = RESULTS) -> pd.DataFrame:
    """Read one row a run; a run that answers ``also`` others is repeated, with the same index."""
    texts = dict.fromkeys(_TEXTS, str)
    rows = pd.read_csv(path, dtype=texts, keep_default_na=False, na_values="")
    rows = rows.fillna(dict.fromkeys(texts, ""))
    others = rows.assign(also=rows["also"].str.split()).explode("also").dropna(subset=["also"])
    parts = others["also"].astype(str).str.split("/").str
    return pd.concat([rows, others.assign(question=parts[0], variant=parts[1])])


def find(rows: pd.DataFrame, run: Mapping[str, Any], keys: Sequence[str] = RUN) -> pd.DataFrame:
    """Return the rows of one run: none or one of results, many of curves; or by other ``keys``."""
    return rows.loc[(rows[[*keys]] == pd.Series(run)[[*keys]]).all(axis=1)]


def append(row: Mapping[str, Any], curves: pd.DataFrame, results: Path = RESULTS) -> None:
    """Add a finished run and its curves, whole or not at all, also while other runs end.

    Curves have a ``kind`` ("loss", "top1", "entropy"), an iteration ``x``, a ``value`` and perhaps
    a ``layer``.
    """
    path = results.with_name(CURVES.name)
    rows, curves = pd.DataFrame([row]), curves.assign(**{key: row[key] for key in RUN})
    with FileLock(f"{results}.lock"):
        if results.exists():
            if not find(read(results), row).empty:
                raise ValueError(f"{results} already has this run; remove its row: {row}")
            rows = pd.concat([pd.read_csv(results, dtype=str, keep_default_na=False), rows])
        if path.exists():
            known = pd.read_parquet(path)
            # A write that was interrupted between the two files left the curves.
            curves = pd.concat([known.drop(find(known, row).index), curves])
        curves = curves.astype({"seed": "int32", "x": "int32", "value": "float32"})
        write_whole(path, curves.to_parquet(index=False, compression="zstd"))
        write_whole(results, rows.to_csv(index=False).encode())


def repeat(run: Mapping[str, Any], config: str, torch: str, path: Path) -> None:
    """Add the row that a run has under other options, or in another question, if there is one."""
    alike = {**run, "config": config, "torch": torch}
    same = find(read(path), alike, ["base", "config", "torch"])
    if not same.empty:
        row = pd.read_csv(path, dtype=str, keep_default_na=False).loc[same.index[0]]
        known = {**run, **row[[*SWEEP, "variant"]]}
        curves = find(pd.read_parquet(path.with_name(CURVES.name)), known)
        append({**row, **run, "also": ""}, curves.drop(columns=RUN), path)


class Noise(NamedTuple):
    """Standard deviation of a run's result by its seed."""

    sigma: float
    degrees: int  # of freedom

    def half_width(self, *counts: int) -> float:
        """Half width of the 95 % interval of a mean of n runs, or of the difference of two."""
        spread = self.sigma * sum(1 / count for count in counts) ** 0.5
        return float(stdtrit(self.degrees, 0.975)) * spread  # NaN without a degree of freedom


def best_rates(rows: pd.DataFrame, metric: str) -> dict[str, float]:
    """Return the rate of each variant's best run; of equal ones, the lowest."""
    ranked = rows.dropna(subset=[metric])
    ranked = ranked.sort_values([metric, "lr"], ascending=[metric == "perplexity", True])
    return ranked.drop_duplicates("variant").set_index("variant")["lr"].to_dict()


def at_best(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the runs that count: those at the rate of their variant that seed 0 found the best.

    ``at_end`` tells whether this rate is the largest or the smallest of several that were tried.
    """
    first = rows["seed"] == rows["seed"].min()
    rates = rows["variant"].map(best_rates(rows.loc[first], metric))
    tried: Any = rows.groupby("variant")["lr"]
    least, most = tried.transform("min"), tried.transform("max")
    rows = rows.assign(at_end=((rates == least) | (rates == most)) & (least < most))
    chose = first & (rows["selected_on"] == "held-out")
    return rows.loc[(rows["lr"] == rates) & ~chose].dropna(subset=[metric])


def noise(best: pd.DataFrame, metric: str) -> Noise:
    """Pool the deviation of seeds over the variants of a sweep.

    Variants that go back to the same models are not independent: they count once.
    """
    own = best.loc[~best.index.duplicated()]
    starts = dict(zip(own["variant"], own["start"], strict=True))
    family = own["variant"]
    while (before := family.map(starts)).isin(starts).any():
        family = before.where(before.isin(starts), family)
    variants = own.groupby([family.rename("family"), "variant"])[metric].agg(["var", "count"])
    families = variants.dropna().groupby("family").mean()
    degrees = families["count"] - 1
    total = degrees.sum()
    return Noise(float((families["var"] * degrees).sum() / max(total, 1)) ** 0.5, int(total))


def paired_noise(best: pd.DataFrame, metric: str) -> Noise:
    """Pool what is left of the deviation after the model that a seed's runs go on from.

    These are the residuals of ``variant + seed`` over the variants with the same start.
    """
    squares, degrees = 0.0, 0
    going_on = best[best["start"].isin(best["variant"]) & ~best.index.duplicated()]
    for _, group in going_on.groupby("start"):
        table = group.pivot(index="seed", columns="variant", values=metric).dropna(axis=1)
        rest = table.sub(table.mean(axis=1), axis=0)
        squares += float(((rest - rest.mean()) ** 2).to_numpy().sum())
        degrees += (table.shape[0] - 1) * max(table.shape[1] - 1, 0)
    return Noise((squares / max(degrees, 1)) ** 0.5, degrees)


def difference(best: pd.DataFrame, one: str, other: str, metric: str) -> tuple[float, float]:
    """Return the difference of two variants' means, and the half width of its 95 % interval.

    Seeds are paired only if both variants go on from the same model of each seed.
    """
    mine, theirs = (best[best["variant"] == name] for name in (one, other))
    starts = {*mine["start"], *theirs["start"]}
    if len(starts) == 1 and starts <= set(best["variant"]):
        steps = mine.set_index("seed")[metric].sub(theirs.set_index("seed")[metric]).dropna()
        width = paired_noise(best, metric).half_width(len(steps), len(steps))
        return float(steps.mean()), width
    width = noise(best, metric).half_width(len(mine), len(theirs))
    return float(mine[metric].mean() - theirs[metric].mean()), width
