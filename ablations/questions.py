"""The questions: a function gives the variants of one, by name; its first line is the title.

``base`` is the config of the sweep, with a TokenFormer; :class:`base.Variant` has the columns.
"""

from collections.abc import Callable
from typing import Any

from base import Base, Options, Variant

from tokenformer_vit.benchmarking.matched import matched_hidden

SIZES = (0.25, 0.5, 0.75)  # of nested models, beside 1
Variants = dict[str, Variant]


def softmax(base: Base) -> Variants:
    """Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters."""
    theta, others = f"{base.prefix}theta", ("vit", "gelu_l2")
    return {
        "softmax": Variant("exp + L1", {theta: "softmax"}, compare=others, paper=79.6),
        "gelu_l1": Variant("GELU + L1", {theta: "gelu_l1"}, compare=others, paper=81.7),
        "gelu_l2": Variant("GELU + L2", {theta: "gelu_l2"}, compare=others[:1], paper=82.5),
        "gelu_l2_post": Variant("L2 after GELU", {theta: "gelu_l2_post"}, compare=others),
        "vit": Variant("ViT, matched", base.vit(), paper=82.3),
    }


def layernorm(base: Base) -> Variants:
    """Does LayerNorm need parameters? The rows of the paper's Table 5."""
    norm, other = f"{base.prefix}norm", ("weight_bias",)
    return {
        "weight_bias": Variant("weight+bias", {norm: "weight+bias"}, paper=82.6),
        "bias": Variant("bias", {norm: "bias"}, compare=other, paper=82.5),
        "none": Variant("none", {norm: "none"}, compare=other, paper=82.5),
    }


def recipes(base: Base) -> Variants:
    """Which recipe? AdamW and Muon (arXiv:2502.16982), for a TokenFormer and a ViT."""
    kind, found = "optim_wrapper.optimizer.type", {}
    for model, label, options in (
        ("tokenformer", "TokenFormer", {}),
        ("vit", "ViT, matched", base.vit()),
    ):
        for name, text, optimizer in (
            ("adamw", "AdamW", "AdamW"),
            ("muon", "Muon", "timm.optim.Muon"),
        ):
            compare = (f"vit_{name}", f"{model}_adamw")
            own = tuple(other for other in compare if other != f"{model}_{name}")
            options = {**options, kind: optimizer}
            found[f"{model}_{name}"] = Variant(f"{label}, {text}", options, compare=own)
    return found


def sizes(base: Base) -> Variants:
    """TokenFormer or ViT at equal cost, at three depths?"""
    found, depth = {}, base.sizes()["depth"]
    for times in (0.5, 1, 2):
        new, label = max(1, round(times * depth)), f"{times:g} × the blocks"
        vit, ours = f"vit_{times:g}", f"tokenformer_{times:g}"
        found[vit] = Variant(f"ViT, {label}", base.vit(depth=new))
        options = {f"{base.prefix}depth": new}
        found[ours] = Variant(f"TokenFormer, {label}", options, compare=(vit,))
    return found


def one_step(base: Base) -> Variants:
    """Does one step of growth pay if the learning rate is still high when it comes?

    Half of the pairs become all after a share of the training; or all, or this half, train for as
    many FLOPs. The rate stays as it is after its warm-up, and falls in the last 15 %.
    """
    half, length = base.pairs(0.5), base.length
    ratio = base.flops(half) / base.flops({})
    # The seed chooses the order of a text, which all results of one pass depend on.
    small, large = ("text", "text") if base.language else ("half", "large")

    def variant(label: str, options: Options, share: float = 1, **about: Any) -> Variant:
        own = {**options, "param_scheduler": stable(base, share * length)}
        return Variant(label, own, length=share * length, **about)

    found = {
        "half": variant("half of the pairs, as long", half, family=small),
        "large": variant("all pairs, as long", {}, family=large, compare=("half",)),
    }
    hooks = base.cfg.get("custom_hooks") or []
    for when in (10, 25, 50, 80):
        cost = when / 100 * ratio + 1 - when / 100  # of that of all pairs
        scratch, longer = f"scratch_{when}", f"longer_{when}"
        text = f"all pairs, cost of {when} %"
        found[scratch] = variant(text, {}, cost, family=large, compare=("large",))
        text = f"half, cost of {when} %"
        found[longer] = variant(text, half, cost / ratio, family=small, compare=("half",))
        time = {"max_epochs": "epoch", "max_iters": "iteration"}[base.unit]
        schedule = [{time: round(when / 100 * length), **base.shares(1)}]
        for init, text in (
            ("zero_key", "zero keys"),
            ("duplicate", "duplicates"),
            ("released", "random, as released"),
        ):
            how = {"init": init, "new_warmup_iters": 100}
            grown = [*hooks, {"type": "GrowthHook", "schedule": schedule, **how}]
            about: Any = {"family": small, "compare": ("large", scratch, longer)}
            options = {**half, "custom_hooks": grown}
            found[f"{init}_{when}"] = variant(f"{text}, {when} %", options, **about)
    return found


def stable(base: Base, length: float) -> list[Options]:
    """Keep the rate after its warm-up, until it falls to a fiftieth in the last 15 %."""
    by_epoch = base.unit == "max_epochs"
    begin = 0.85 * max(1, round(length))
    decay = {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.02, "by_epoch": by_epoch}
    decay |= {"begin": begin if by_epoch else round(begin), "convert_to_iter_based": by_epoch}
    return [base.cfg.param_scheduler[0], decay]


def nested(base: Base) -> Variants:
    """Does one training give several sizes, each as good as a model of this size alone?

    By the sandwich rule (arXiv:1903.05134), or with Scala's distillation (arXiv:2412.04786): a
    smaller size also learns what a larger one predicts. Of the ViT hidden neurons are nested, at
    the FLOPs of the sizes of all pairs, but at least a tenth.
    """
    found = {
        f"alone_{100 * share:g}": Variant(f"alone, {share:g}", base.pairs(share)) for share in SIZES
    }
    found["alone_100"] = Variant("alone, 1", family="alone_100")
    classifier, sizes = {"model.type": "NestedClassifier"}, list(SIZES)
    # The weights of attention, which stay, divided by those of the hidden neurons.
    attention = 2 * base.width / matched_hidden(base.width, base.pairs_of_block)
    shares = {max(0.1, round(size - (1 - size) * attention, 3)) for size in SIZES}
    vit = {**base.vit()["model.backbone"], "type": "NestedViT", "nested": sorted(shares)}
    text, options = "nested ViT, as MatFormer", {**classifier, "model.backbone": vit}
    found["vit_nested"] = Variant(text, options, compare=("alone_100",), family="vit_nested")
    sized = {**classifier, "model.backbone.nested": sizes}
    for name, label, options, family in (
        ("sandwich", "nested, sandwich", sized, "sandwich"),
        # Its first tenth is the training of all pairs alone.
        ("scala", "nested, Scala's distillation", sized | {"model.distill": True}, "alone_100"),
    ):
        compare = ("alone_100", "vit_nested")
        found[name] = Variant(label, options, compare=compare, family=family)
    return found


def nested_tuning(base: Base) -> Variants:
    """Which sizes should one training of a pretrained ViT give: of all pairs, or of hidden neurons?

    Nested hidden neurons and whole attention are a nested ViT, as MatFormer (arXiv:2310.07707).
    Its sizes have the FLOPs of those of the config. Models alone start from a refit of each size.
    """
    own = {"model_name": "vit_small_patch14_dinov2", "img_size": base.inner.patch_embed.img_size[0]}
    own["checkpoint_path"] = "work_dirs/ordered_vit/keep_1/model.safetensors"
    vit = {**own, "type": "TimmClassificationBackbone", "_delete_": True}
    nested = {**vit, "type": "NestedViT", "nested": [0.1, 0.25, 0.5]}
    whole = {"model.type": "ImageClassifier", "model.backbone": vit}
    about: Any = {"family": "pretrained"}
    found = {
        "whole": Variant("ViT, alone", whole, **about),
        "vit": Variant("nested ViT", {"model.backbone": nested}, compare=("whole",), **about),
        "tokens": Variant("nested, all pairs", compare=("whole", "vit"), **about),
    }
    for size in base.inner.sizes[:-1]:
        options = {"model.type": "ImageClassifier", "model.backbone.nested": None}
        path = f"work_dirs/ordered/keep_{size:g}/model.safetensors"
        options |= {"model.backbone.checkpoint_path": path, **base.pairs(size)}
        found[f"alone_{100 * size:g}"] = Variant(f"alone, {size:g}", options, **about)
    return found


def adapters(base: Base) -> Variants:
    """Which few new weights adapt a pretrained ViT?

    Beside a new head, as many in each variant: linear tokens of rank 8 in q, k, v and o, from zero
    keys or as LoRA, hidden neurons of the feed-forward part, or half of both.
    """
    backbone = "model.backbone."
    frozen = {f"{backbone}frozen": True, f"{backbone}growth": None}
    found = {"head": Variant("head alone", frozen, family="pretrained")}
    for name, label, rank, neurons, options in (
        ("lora", "LoRA of q, k, v, o", 8, 0, {f"{backbone}type": "LoRA"}),
        ("linear", "linear tokens of q, k, v, o", 8, 0, {}),
        ("gelu", "pairs of the feed-forward part", 0, 32, {}),
        ("both", "half of both", 4, 16, {}),
    ):
        new = zip(base.counts.items(), (rank, rank, neurons), strict=True)
        growth = {key: count + more for (key, count), more in new} | {"freeze": "old"}
        others = {"lora": ("head",), "linear": ("head", "lora")}.get(name, ("head", "linear"))
        options = {**options, f"{backbone}growth": growth}
        found[name] = Variant(label, options, compare=others, family="pretrained")
    return found


def mae(base: Base) -> Variants:
    """Does pre-training by masked images (MAE) help, with all labels and with a tenth?

    Pre-training (arXiv:2111.06377) has five times the epochs of the config, and so has fine-tuning
    with a tenth of the labels. The same model from scratch has as many epochs as both together.
    """
    found, path, length = {}, "model.backbone.checkpoint_path", base.length
    scratch = {path: "", "optim_wrapper.paramwise_cfg.layer_decay_rate": 1.0}
    for kind, name, model in (("ours", "TokenFormer", {}), ("vit", "ViT", base.vit())):
        whole = {key: {**each, "checkpoint_path": ""} for key, each in model.items()}
        encoder = {key: {**each, "global_pool": "token"} for key, each in whole.items()}
        how: Any = {"config": "mae_cifar10_micro_pretrain", "length": 5 * length}
        found[f"{kind}_mae"] = Variant(f"{name}, MAE", encoder, **how)
        for labels, share, epochs in (("all", 1.0, length), ("tenth", 0.1, 5 * length)):
            part, text = {"train_dataloader.dataset.share": share}, f"{share:.0%} of the labels"
            for way, start, options, more in (
                ("scratch", "", scratch, 5 * length),
                ("mae", f"{kind}_mae", {path: "{start}/model.safetensors"}, 0),
            ):
                others = (f"{kind}_scratch_{labels}", f"vit_{way}_{labels}")
                own = f"{kind}_{way}_{labels}"
                found[own] = Variant(
                    f"{name}, {'MAE' if start else 'from scratch'}, {text}",
                    {**whole, **part, **options},
                    start=start,
                    family=start,
                    compare=tuple(other for other in others if other != own),
                    length=epochs + more,
                )
    return found


QUESTIONS: dict[str, Callable[[Base], Variants]] = {
    each.__name__: each
    for each in (softmax, layernorm, recipes, sizes, one_step, nested, nested_tuning, adapters, mae)
}
