"""The charts of ablations/README.md; bars are 95 % intervals."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from report import Sweep, by_size
from results import CURVES, FOLDER, RUN, Noise, difference, noise

BASE = "cifar10_micro_50k"
LEADS = {  # epochs, sweep, TokenFormer, ViT; the last one also by epoch
    "AdamW": (
        (2, f"budget/{BASE}", "ours_one_quarter", "vit_one_quarter"),
        (4, f"budget/{BASE}", "ours_one_half", "vit_one_half"),
        (8, f"early/{BASE}", "tokenformer", "vit"),
        (20, f"recipes/{BASE}/train_cfg.max_epochs=20", "tokenformer_adamw", "vit_adamw"),
    ),
    "Muon": tuple(
        (epochs, f"recipes/{BASE}/train_cfg.max_epochs={epochs}", "tokenformer_muon", "vit_muon")
        for epochs in (8, 20, 50)
    ),
}
STAGES = {  # {} is how many times as large as the small model
    "large, from scratch": ("x{}_sunk_20", "x{}_shared_20", "x{}_counted_20", "x{}"),
    "small, trained on": ("small", "x{}_same_10", "x{}_same_20"),
    "small, grown by zero keys": ("x{}_zero_key_10", "x{}_zero_key_20"),
    "small, grown by random pairs": ("x{}_released_10", "x{}_released_20"),
}
WAYS = ("sandwich", *(f"{way}_{size}" for way in ("alone", "vit") for size in (25, 50, 75, 100)))


def draw(found: Mapping[str, Sweep]) -> None:
    """Draw all charts."""
    titles = "TokenFormer − ViT: top-1 in points", "the same, during the longest trainings"
    with chart("lead", *titles) as (ends, within):
        for label, leads in LEADS.items():
            points = [
                (epochs, *difference(found[key].best, ours, vit, "top1"))
                for epochs, key, ours, vit in leads
            ]
            ends.errorbar(*zip(*points, strict=True), marker="o", capsize=2, label=label)
            _, key, ours, vit = leads[-1]
            means = by_epoch(found[key])
            within.plot((means[ours] - means[vit]).dropna(), marker=".", label=label)
        for axes in (ends, within):
            axes.axhline(0, color="0.5")
            axes.set(xlabel="epochs")
    with chart("theta", "Θ: top-1 (%)", "LayerNorm: top-1 (%)") as panels:
        for axes, name in zip(panels, ("softmax", "layernorm"), strict=True):
            sweep = found[f"{name}/{BASE}"]
            means, places = sweep.means["top1"][[*sweep.variants]], range(len(sweep.variants))
            width = noise(sweep.best, "top1").half_width(sweep.n)
            axes.errorbar(means, places, xerr=width, fmt="o")
            axes.set_yticks(places, [each.label for each in sweep.variants.values()])
            axes.invert_yaxis()
            axes.set_xlim(49, 61)
    with chart("growth", "images, × 3: top-1 (%)", "text, × 4: perplexity") as (images, text):
        for axes, key, times in ((images, f"stages/{BASE}", 3), (text, "lm_stages/lm_micro", 4)):
            sweep, metric = found[key], found[key].question.metric
            width = noise(sweep.best, metric).half_width(sweep.n)
            runs = sweep.best.groupby("variant").first()
            spent = runs["flops"] + runs["start"].map(runs["flops"]).fillna(0)
            for label, names in STAGES.items():
                own = [name.format(times) for name in names]
                means = sweep.means.loc[own, metric]
                axes.errorbar(spent[own], means, width, marker="o", capsize=2, label=label)
            axes.set(xscale="log", xlabel="training FLOPs")
    with chart("nested", "top-1 (%) over the share of the pairs") as (axes,):
        sizes, _ = by_size(found[f"nested/{BASE}"], WAYS)
        axes.plot(sizes.T, marker="o", label=[*sizes.index])
    with chart("from_vit", "converted ViTs: top-1 (%)") as (axes,):
        pairs = pd.read_csv(CURVES.with_name("from_vit.csv")).query("part == 'pairs'")
        kept, count = pairs["name"].str.split("/", expand=True).astype(int).to_numpy().T
        pairs["share"] = kept / count
        for _, own in pairs.groupby(["model", "variant"], sort=False):
            label, seeds = own["variant"].iloc[0], own.groupby("share")["value"]
            width = seeds.agg(lambda own: Noise(own.std(), len(own) - 1).half_width(len(own)))
            axes.errorbar(width.index, seeds.mean(), width, marker="o", capsize=2, label=label)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="share of the pairs kept in q, k and v")


def by_epoch(sweep: Sweep) -> Any:
    """Return the mean top-1 of each variant by epoch, at the runs' validations."""
    runs = sweep.best[[*RUN, "epochs", "iterations"]]
    curves = pd.read_parquet(CURVES).query("kind == 'top1'").merge(runs, on=RUN)
    curves["epoch"] = curves["x"] * curves["epochs"] / curves["iterations"]
    return curves.pivot_table("value", "epoch", "variant")


@contextmanager
def chart(name: str, *titles: str) -> Iterator[list[Any]]:
    """Yield a panel for each title; then add the legends and write the figure."""
    figure = Figure(figsize=(5.5 * len(titles), 3.8), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.grid(alpha=0.3)
    yield panels
    for axes in panels:
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    figure.savefig(FOLDER / "figures" / f"{name}.png", dpi=90, metadata={"Software": None})
