"""The charts of ablations/README.md; bars are 95 % intervals."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from report import Sweep, by_size
from results import CURVES, FOLDER, RUN, Noise, difference, noise

BASE = "cifar10_micro_50k"
STEP = f"one_step/{BASE}/train_cfg.max_epochs=20/optim_wrapper.optimizer.type=timm.optim.Muon"
LM_STEP = (
    "lm_one_step/lm_micro/train_cfg.max_iters=4000/train_cfg.val_interval=400/"
    "optim_wrapper.optimizer.type=timm.optim.Muon"
)
STEM = "recipes/cifar10_stem/train_cfg.max_epochs={}/train_dataloader.batch_size=256"
IMAGENETTE = "recipes/imagenette_stem"
TUNED = (
    "tuning/tuning_imagenette/"
    "model.backbone.checkpoint_path=work_dirs/converted/large_seed0/model.safetensors"
)
LEADS = {  # epochs, sweep, TokenFormer, ViT; the last one also by epoch
    "AdamW": (
        (2, f"budget/{BASE}", "ours_one_quarter", "vit_one_quarter"),
        (4, f"budget/{BASE}", "ours_one_half", "vit_one_half"),
        (8, f"early/{BASE}", "tokenformer", "vit"),
        (20, f"recipes/{BASE}/train_cfg.max_epochs=20", "tokenformer_adamw", "vit_adamw"),
        (50, f"recipes/{BASE}/train_cfg.max_epochs=50", "tokenformer_adamw", "vit_adamw"),
        (100, f"recipes/{BASE}/train_cfg.max_epochs=100", "tokenformer_adamw", "vit_adamw"),
    ),
    "Muon": tuple(
        (epochs, f"recipes/{BASE}/train_cfg.max_epochs={epochs}", "tokenformer_muon", "vit_muon")
        for epochs in (8, 20, 50, 100)
    ),
    "AdamW, 64 tokens": tuple(
        (epochs, STEM.format(epochs), "tokenformer_adamw", "vit_adamw") for epochs in (16, 60)
    ),
    "Muon, 64 tokens": tuple(
        (epochs, STEM.format(epochs), "tokenformer_muon", "vit_muon") for epochs in (16, 24)
    ),
}
UNITS = {"flops": "training FLOPs", "seconds": "seconds"}
TUNINGS = {  # from few trained parameters to all
    "TokenFormer: head; appended pairs; all": ("probe", "tokens_small", "tokens_large", "full"),
    "ViT: head; LoRA; all": ("vit_probe", "lora_small", "lora_large", "vit_full"),
}
STAGES = {  # {} is how many times as large as the small model
    "large, from scratch": ("x{}_sunk_20", "x{}_shared_20", "x{}_counted_20", "x{}"),
    "small, trained on": ("small", "x{}_same_10", "x{}_same_20"),
    "small, grown by zero keys": ("x{}_zero_key_10", "x{}_zero_key_20"),
    "small, grown by random pairs": ("x{}_released_10", "x{}_released_20"),
}
ONE_STEP = {  # at the end; the growths are after 80, 50 and 25 % of the training
    "all pairs": ("scratch_80", "scratch_50", "scratch_25", "large"),
    "half of the pairs": ("half", "longer_80", "longer_50", "longer_25"),
    "grown by zero keys": ("zero_key_80", "zero_key_50", "zero_key_25"),
    "grown by duplicates": ("duplicate_80", "duplicate_50", "duplicate_25"),
    "grown by random pairs": ("released_80", "released_50", "released_25"),
    "ViT or Transformer, Net2Net": ("net2net_80", "net2net_50", "net2net_25", "reference"),
}
DURING = ("half", "large", *ONE_STEP["grown by zero keys"])
LENGTHS = {"8 epochs, AdamW": "", "20 epochs, Muon": STEP.removeprefix(f"one_step/{BASE}")}
WAYS = (
    "sandwich",
    "scala",
    *(f"{way}_{size}" for way in ("alone", "vit") for size in (25, 50, 75, 100)),
)


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
            means = by_length(found[key])
            within.plot((means[ours] - means[vit]).dropna(), marker=".", label=label)
        for axes in (ends, within):
            axes.axhline(0, color="0.5")
            axes.set(xlabel="epochs")
    titles = "64 tokens, AdamW, on an H100: top-1 (%)", "64 tokens, Muon, on a CPU: top-1 (%)"
    for unit, label in UNITS.items():
        with chart(f"stem_{unit}", *titles) as panels:
            for axes, epochs in zip(panels, (60, 24), strict=True):
                bands(axes, found[STEM.format(epochs)], unit)
                axes.set(xlabel=label, xlim=(0, None), ylim=(70, None))
    with chart("imagenette", "Imagenette, 256 tokens: top-1 (%)") as (axes,):
        bands(axes, found[IMAGENETTE], "epochs")
        axes.set(xlabel="epochs", ylim=(50, None))
    with chart("theta", "Θ: top-1 (%)", "LayerNorm: top-1 (%)") as panels:
        for axes, name in zip(panels, ("softmax", "layernorm"), strict=True):
            for label, options in LENGTHS.items():
                sweep = found[f"{name}/{BASE}{options}"]
                labels = [each.label for each in sweep.variants.values()]
                width = noise(sweep.best, "top1").half_width(sweep.n)
                means = sweep.means["top1"][[*sweep.variants]]
                axes.errorbar(means, labels, xerr=width, fmt="o", capsize=2, label=label)
            axes.invert_yaxis()
            axes.set_xlim(38, 77)  # with a place for the legend
    with chart("growth", "images, × 3: top-1 (%)", "text, × 4: perplexity") as (images, text):
        for axes, key, times in ((images, f"stages/{BASE}", 3), (text, "lm_stages/lm_micro", 4)):
            runs = found[key].best.groupby("variant").first()
            spent = runs["flops"] + runs["start"].map(runs["flops"]).fillna(0)
            for label, names in STAGES.items():
                line(axes, found[key], spent, [name.format(times) for name in names], label)
            axes.set(xscale="log", xlabel=UNITS["flops"])
    for key, title, limits in (
        (STEP, "images: top-1 (%) at the end", {"bottom": 60}),
        (LM_STEP, "text: perplexity at the end", {"top": 7}),
    ):
        sweep = found[key]
        with chart(sweep.question.name, title, "the same during training") as (end, during):
            for label, names in ONE_STEP.items():
                if own := [name for name in names if name in sweep.variants]:
                    line(end, sweep, sweep.means["flops"], own, label)
            means = by_length(sweep)
            for name in (each for each in DURING if each in means):
                during.plot(means[name].dropna(), marker=".", label=sweep.variants[name].label)
            end.set(xlabel=UNITS["flops"])
            during.set(xlabel=means.index.name)
            during.set_ylim(**limits)
    with chart("nested", *(f"{each}: top-1 (%)" for each in LENGTHS)) as panels:
        limits = (46, 56)  # pruned models have less
        for axes, options, least in zip(panels, LENGTHS.values(), limits, strict=True):
            sweep = found[f"nested/{BASE}{options}"]
            ways(axes, sweep, [name for name in WAYS if name in sweep.variants])
            axes.set(xlabel="share of the pairs", ylim=(least, None))
    ranks = pd.read_csv(CURVES.with_name("from_vit.csv")).query("part == 'ranks'")
    kept, count = ranks["name"].str.split("/", expand=True).astype(int).to_numpy().T
    ranks["share"] = kept / count
    models = ranks.groupby("model", sort=False)
    with chart("from_vit", *(f"{name}: top-1 (%)" for name, _ in models)) as panels:
        for axes, (_, rows) in zip(panels, models, strict=True):
            for label, own in rows.groupby("variant", sort=False):
                values = own.groupby("share")["value"]
                mean: Any = values.mean()
                width = values.agg(lambda own: Noise(own.std(), len(own) - 1).half_width(len(own)))
                axes.errorbar(mean.index, mean, width.fillna(0), marker="o", capsize=2, label=label)
            axes.set(xlabel="share of the rank kept in q, k, v and o")
    rows = pd.read_csv(CURVES.with_name("any_size.csv")).query("seed > 0")
    whole = rows.query("method == 'whole'")
    with chart("any_size", "smaller without training: top-1 (%)") as (axes,):
        for method in ("refit", "usage", "torch-pruning inner"):
            own = pd.concat([whole, rows.query("method == @method")])
            means: Any = own.groupby("target")[["flops", "top1"]].mean()
            axes.plot(means["flops"], means["top1"], marker="o", label=method)
        axes.set(xlabel="forward FLOPs for an image", xlim=(0, None), ylim=(0, 100))
        axes.xaxis.set_major_formatter(EngFormatter())
    with chart("tuning", "a converted ViT, tuned on other images: top-1 (%)") as (axes,):
        runs = found[TUNED].best.groupby("variant").first()
        trained = runs["trainable"].fillna(runs["parameters"])
        for label, names in TUNINGS.items():
            line(axes, found[TUNED], trained, names, label)
        axes.set(xscale="log", xlabel="trained parameters")
    titles = "a converted ViT, cut: top-1 (%)", "from scratch, at equal cost: top-1 (%)"
    with chart("converted", *titles) as (cut, taught):
        sweep = found[f"converted_sizes/{BASE}"]
        ways(cut, sweep, ("longer", "nested"))
        whole, vit = sweep.means.loc["longer"], sweep.means.loc["vit_longer"]
        place, label = vit["flops"] / whole["flops"], sweep.variants["vit_longer"].label
        cut.plot(place, vit["top1"], "ks", label=label)
        cut.set(xlabel="share of the pairs; of the ViT: its share of the FLOPs")
        sweep = found[f"distilled/{BASE}"]
        means = curves_of(sweep).pivot_table("value", "share", "variant")
        for name, each in sweep.variants.items():
            taught.plot(means[name].dropna(), marker=".", label=each.label)
        taught.set(xlabel="share of the training", ylim=(60, None))


def curves_of(sweep: Sweep) -> Any:
    """Return the results at the runs' validations, each at a share of its training."""
    runs = sweep.best[[*RUN, "start", "epochs", "iterations", *UNITS]]
    curves = pd.read_parquet(CURVES).query("kind == @sweep.question.metric").merge(runs, on=RUN)
    return curves.assign(share=curves["x"] / curves["iterations"])


def bands(axes: Any, sweep: Sweep, unit: str) -> None:
    """Draw results during training; each validation has one σ, pooled over the variants."""
    curves = curves_of(sweep)
    width = pd.Series(
        {share: noise(own, "value").half_width(sweep.n) for share, own in curves.groupby("share")}
    )
    for name, own in curves.groupby("variant"):
        mean = own.groupby("share")["value"].mean()
        places = mean.index * own[unit].mean()
        axes.plot(places, mean, label=sweep.variants[name].label)
        axes.fill_between(places, mean - width, mean + width, alpha=0.3)


def by_length(sweep: Sweep) -> Any:
    """Return the mean result of each variant at each validation."""
    curves = curves_of(sweep)
    unit = "epochs" if curves["epochs"].notna().all() else "iterations"
    return curves.pivot_table("value", (curves["share"] * curves[unit]).rename(unit), "variant")


def line(axes: Any, sweep: Sweep, places: Any, names: Sequence[str], label: str) -> None:
    """Draw the results of variants with the interval of the sweep's σ."""
    metric, own = sweep.question.metric, [*names]
    seeds, means = sweep.best["variant"].value_counts()[own], sweep.means.loc[own, metric]
    width = seeds.map(noise(sweep.best, metric).half_width)
    axes.errorbar(places[own], means, width, marker="o", capsize=2, label=label)


def ways(axes: Any, sweep: Sweep, names: Sequence[str]) -> None:
    """Draw what each way gives at each size with the interval of the sweep's σ."""
    sizes, _ = by_size(sweep, names)
    width = noise(sweep.best, "top1").half_width(sweep.n)
    for label, values in sizes.iterrows():
        axes.errorbar(sizes.columns, values, width, marker=".", capsize=3, label=label)


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
