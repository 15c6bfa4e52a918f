"""The charts of the results page; bars are 95 % intervals."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill
from typing import Any

import pandas as pd
import results
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from report import Sweep
from results import FOLDER, Estimate

LEADS = {  # sweeps of growing length
    "AdamW": ("early", "recipes_20", "recipes_50", "recipes_100"),
    "Muon": ("recipes_8", "recipes_20", "recipes_50", "recipes_100"),
    "AdamW, conv stem": ("stem_16", "stem_60"),
    "Muon, conv stem": ("stem_16", "stem_24"),
}
ONE_STEP = {  # at the end; the growths are after 80, 50 and 25 % of the training
    "all pairs": ("scratch_80", "scratch_50", "scratch_25", "large"),
    "half of the pairs": ("half", "longer_80", "longer_50", "longer_25"),
    "grown by zero keys": ("zero_key_80", "zero_key_50", "zero_key_25"),
    "grown by duplicates": ("duplicate_80", "duplicate_50", "duplicate_25"),
    "grown by random pairs": ("released_80", "released_50", "released_25"),
    "ViT or Transformer, Net2Net": ("net2net_80", "net2net_50", "net2net_25", "reference"),
}
METHODS = {
    "refit": "refit",
    "refit_equal": "refit, as a plain ViT",
    "snapvit": "heads and neurons, refitted",
    "usage": "neurons by usage",
    "torch-pruning_l2": "Torch-Pruning, L2",
    "torch-pruning_taylor": "Torch-Pruning, Taylor",
}
TIME = "milliseconds of an image"
SIZED = {"alone": "alone_100", "nested, sandwich": "sandwich", "nested, Scala": "scala"}
NESTED = {  # sweep: line: its sizes
    "nested_tuning": {
        "nested TokenFormer": ("tokens_30", "tokens_37.5", "tokens_50", "tokens"),
        "nested ViT": ("vit_10", "vit_25", "vit_50", "vit"),
        "each alone": ("alone_30", "alone_37.5", "alone_50", "whole"),
    },
    "nested_8": {
        "nested TokenFormer": ("sandwich_25", "sandwich_50", "sandwich_75", "sandwich"),
        "nested ViT": ("vit_nested_10", "vit_nested_33.3", "vit_nested_66.7", "vit_nested"),
    },
}


def draw(found: Mapping[str, Sweep]) -> None:
    """Draw all charts."""
    title = "TokenFormer − ViT: top-1 in points (above 0: TokenFormer leads)"
    with chart("accuracy", title, xlabel=["training FLOPs"]) as (axes,):
        for label, names in LEADS.items():
            how, runs = label.partition(",")[0].lower(), [found[name] for name in names]
            part = ["" if name == "early" else f"_{how}" for name in names]
            pairs = [(f"tokenformer{own}", f"vit{own}") for own in part]
            leads = [s.difference(*pair)[0] for s, pair in zip(runs, pairs, strict=True)]
            costs = [s.flops[pair[0]] for s, pair in zip(runs, pairs, strict=True)]
            points(axes, costs, leads, label)
        axes.axhline(0, color="0.5")
        axes.set_xscale("log")
    titles = "top-1 (%) without training", "top-1 (%) without training, batch 32"
    with chart("any_size", *titles, xlabel=("FLOPs of an image", TIME)) as panels:
        for method, label in METHODS.items():
            own = [found[name].means for name in ("any_size", "any_size_baselines")]
            means = pd.concat(own).filter(regex=rf"^(whole|{method}_[\d.]+)$", axis=0)
            seconds = found["any_size_ms_32"].means["milliseconds"].reindex(means.index)
            for axes, places in zip(panels, (means["forward_flops"], seconds), strict=True):
                order = places.dropna().sort_values().index
                if len(order) > 1:
                    axes.plot(places[order], means["top1"][order], marker="o", label=label)
                axes.set_xlim(0, None)
                axes.set_ylim(79, 96)  # usage and Torch-Pruning fall below it
    title = "top-1 (%) of each size"
    with chart("nested", title, title, xlabel=("FLOPs of an image", TIME)) as panels:
        sweep, sizes, times = found["nested"], (25, 50, 75), found["nested_ms_128"].means
        alone = [*(f"alone_{size}" for size in sizes), "alone_100"]
        images = sweep.means["iterations"] * sweep.means["batch_size"]
        flops = sweep.flops[alone] / images[alone] / 3  # a step costs three forward passes
        for label, whole in SIZED.items():
            names = alone if label == "alone" else [*(f"{whole}_{n}" for n in sizes), whole]
            for axes, places in zip(panels, (flops, times["milliseconds"][alone]), strict=True):
                points(axes, places, [value(sweep, name) for name in names], label)
    titles = "top-1 (%) of each size of a pretrained ViT-S", "the same from scratch, CIFAR-10"
    with chart("nested_tuning", *titles, xlabel=["FLOPs of an image"] * 2) as panels:
        for axes, (sweep, lines) in zip(panels, NESTED.items(), strict=True):
            for label, names in lines.items():
                places = found[sweep].means["forward_flops"][[*names]]
                points(axes, places, [value(found[sweep], name) for name in names], label)
    titles = "top-1 (%), a tenth of Imagenette", "top-1 (%), 1,000 images of CIFAR-10"
    labels = found["adapters_imagenette"].first["label"].map(lambda label: fill(label, 14))
    with chart("adapters", *titles, xlabel=("", "")) as panels:
        for axes, name in zip(panels, ("adapters_imagenette", "adapters_cifar10"), strict=True):
            values = [value(found[name], each) for each in labels.index]
            points(axes, labels, values, "a frozen ViT-S and few new weights")
            axes.lines[0].set_linestyle("")
    titles = "images: top-1 (%)", "text: perplexity (lower is better)"
    with chart("growth", *titles, xlabel=["training FLOPs"] * 2) as panels:
        for axes, name in zip(panels, ("one_step", "lm_one_step"), strict=True):
            for label, names in ONE_STEP.items():
                places = found[name].flops[[*names]]
                points(axes, places, [value(found[name], each) for each in names], label)


def value(sweep: Sweep, name: str) -> Estimate:
    """Return the mean of a variant with the σ of its sweep."""
    return results.contrast(sweep.best, {name: 1})


def points(axes: Any, places: Any, values: Sequence[Estimate], label: str) -> None:
    """Draw estimates with their intervals."""
    means, widths = [each.value for each in values], [each.width for each in values]
    axes.errorbar([*places], means, widths, marker="o", capsize=2, label=label)


@contextmanager
def chart(name: str, *titles: str, xlabel: Sequence[str]) -> Iterator[list[Any]]:
    """Yield a panel for each title; then add the legends and write the figure."""
    figure = Figure(figsize=(5.5 * len(titles), 3.8), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title)
        axes.grid(alpha=0.3)
    yield panels
    panels[0].legend(fontsize="small")
    for axes, label in zip(panels, xlabel, strict=True):
        axes.set_xlabel(label)
        if "FLOPs" in label:
            axes.xaxis.set_major_formatter(EngFormatter())
    path = FOLDER / "figures" / f"{name}.png"
    figure.savefig(path, dpi=90, metadata={"Software": None})
