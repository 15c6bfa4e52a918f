"""The charts of ablations/README.md; bars are 95 % intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from report import Sweep, by_size
from results import CURVES, FOLDER, difference, noise

BASE = "cifar10_micro_50k"
LEADS = {  # epochs, sweep, TokenFormer, ViT
    "AdamW": (
        (2, f"budget/{BASE}", "ours_one_quarter", "vit_one_quarter"),
        (4, f"budget/{BASE}", "ours_one_half", "vit_one_half"),
        (8, f"budget/{BASE}", "ours_one_all", "vit_one_all"),
        (20, f"stages/{BASE}", "x3", "x3_reference"),
    ),
    "Muon": ((8, f"recipes/{BASE}", "tokenformer_muon", "vit_muon"),),
}
STAGES = {  # {} is how many times as large as the small model
    "large, from scratch": ("x{}_sunk_20", "x{}_shared_20", "x{}_counted_20", "x{}"),
    "small, trained on": ("small", "x{}_same_10", "x{}_same_20"),
    "small, grown by zero keys": ("x{}_zero_key_10", "x{}_zero_key_20"),
    "small, grown by random pairs": ("x{}_released_10", "x{}_released_20"),
}
FIRST_STEPS = ("same", "zero_key", "zero_key_lr10", "duplicate", "random")
WAYS = ("sandwich", *(f"{way}_{size}" for way in ("alone", "vit") for size in (25, 50, 75, 100)))


def draw(found: Mapping[str, Sweep]) -> None:
    """Draw all charts."""
    (axes,) = panels = start("TokenFormer − ViT, top-1 in points")
    for name, points in LEADS.items():
        epochs, *_ = zip(*points, strict=True)
        leads = [difference(found[key].best, one, two, "top1") for _, key, one, two in points]
        values, widths = zip(*leads, strict=True)
        axes.errorbar(epochs, values, widths, marker="o", capsize=2, label=name)
    axes.axhline(0, color="0.5")
    axes.set(xlabel="epochs of the training")
    finish(panels, "lead")

    panels = start("Θ: top-1 (%)", "LayerNorm: top-1 (%)")
    for axes, question in zip(panels, ("softmax", "layernorm"), strict=True):
        sweep = found[f"{question}/{BASE}"]
        places, width = range(len(sweep.names)), noise(sweep.best, "top1").half_width(sweep.seeds)
        axes.errorbar(sweep.means[sweep.names], places, xerr=width, fmt="o")
        axes.set_yticks(places, map(sweep.label, sweep.names))
        axes.invert_yaxis()
        axes.set_xlim(49, 61)
    finish(panels, "theta")

    panels = start("images, × 3: top-1 (%)", "text, × 4: perplexity")
    over_flops(panels[0], found[f"stages/{BASE}"], STAGES, 3)
    over_flops(panels[1], found["lm_stages/lm_micro"], STAGES, 4)
    finish(panels, "growth")

    (axes,) = panels = start("perplexity after growth")
    curves = pd.read_parquet(CURVES).query("question == 'growth_start' and kind == 'perplexity'")
    for name in FIRST_STEPS:
        mean = curves[curves["variant"] == name].groupby("x")["value"].mean()
        axes.plot(mean, label=found["growth_start/lm_micro"].label(name))
    axes.set(xlabel="iteration after growth")
    finish(panels, "first_steps")

    (axes,) = panels = start("top-1 (%) over the share of the pairs")
    for way, means in by_size(found[f"nested/{BASE}"], WAYS)[0].iterrows():
        axes.plot(means.dropna(), marker="o", label=way)
    finish(panels, "nested")


def start(*titles: str) -> list[Any]:
    """Make a figure with a panel for each title."""
    figure = Figure(figsize=(5.5 * len(titles), 3.8), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.grid(alpha=0.3)
    return panels


def finish(panels: Sequence[Any], name: str) -> None:
    """Add the legends and write the figure."""
    for axes in panels:
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize="small")
    path = FOLDER / "figures" / f"{name}.png"
    panels[0].figure.savefig(path, dpi=90, metadata={"Software": None})


def over_flops(axes: Any, sweep: Sweep, lines: Mapping[str, Sequence[str]], times: int) -> None:
    """Draw results over training FLOPs, with those of the model that a run goes on from."""
    runs = sweep.best.groupby("variant").first()
    spent = runs["flops"] + runs["start"].map(runs["flops"]).fillna(0)
    width = noise(sweep.best, sweep.question.metric).half_width(sweep.seeds)
    for label, names in lines.items():
        own = [name.format(times) for name in names]
        axes.errorbar(spent[own], sweep.means[own], width, marker="o", capsize=2, label=label)
    axes.set(xscale="log", xlabel="training FLOPs")
