"""Which recipe? The paper's, Muon instead of AdamW, and DeiT III's, for a TokenFormer and a ViT.

*AdamW* is the recipe of the config. *Muon* changes only the optimiser: it makes the steps of the
parameter tokens, or of the weights in the ViT's blocks, orthogonal, at the size of AdamW's steps
(arXiv:2502.16982). AdamW updates the rest. Query, key and value of the TokenFormer are matrices of
their own, and those of the ViT are one matrix. *DeiT III* (arXiv:2204.07118) is LAMB, binary
cross-entropy on mixed images, LayerScale, and a random grayscale, solarisation or blur before a
change of colours. Crops, drop path and the length are the config's, and no image is repeated within
an epoch. The ViT is timm's, with as many parameters.
"""

from functools import partial

from tokenformer_vit.experiments import (
    Baseline,
    ModelChange,
    Part,
    Shape,
    Variant,
    arguments,
    main,
    to_matched_vit,
)

MUON = {"optim_wrapper": {"optimizer": {"type": "timm.optim.Muon"}}}
DEIT3 = {
    "optim_wrapper": {
        "optimizer": {"type": "timm.optim.Lamb", "betas": (0.9, 0.999), "weight_decay": 0.05}
    },
    "model": {
        "head": {
            # The steps of LAMB are in proportion to a matrix: a head of zeros would stay there.
            "init_cfg": {"_delete_": True, "type": "TruncNormal", "layer": "Linear", "std": 0.02},
            "loss": {"_delete_": True, "type": "BinaryCrossEntropy"},
        },
        "train_cfg": {
            "_delete_": True,
            "augments": [{"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}],
        },
    },
}
RECIPES = {"adamw": ("AdamW", {}), "muon": ("Muon", MUON), "deit3": ("DeiT III", DEIT3)}


def change(shape: Shape, length: int, recipe: str) -> Part:
    """Return what a recipe changes outside the backbone."""
    changes = RECIPES[recipe][1]
    if recipe != "deit3":
        return changes
    blur = {"type": "GaussianBlur", "magnitude_range": (0.1, 2.0), "magnitude_std": "inf"}
    choices = [
        {"type": "v2/Grayscale", "num_output_channels": 3},
        {"type": "v2/RandomSolarize", "threshold": 128, "p": 1.0},
        {**blur, "prob": 1.0},
    ]
    side = shape.outside["img_size"]
    transforms = [
        {"type": "v2/RandomCrop", "size": side, "padding": side // 8},
        {"type": "v2/RandomHorizontalFlip", "p": 0.5},
        {"type": "RandomChoice", "transforms": [[each] for each in choices]},
        {"type": "v2/ColorJitter", "brightness": 0.3, "contrast": 0.3, "saturation": 0.3},
    ]
    pipeline = [{"type": "LoadImage"}, *transforms, {"type": "PackLabels"}]
    # Images in memory are only cropped and flipped.
    dataset = {"type": "CustomDataset", "pipeline": pipeline}
    return {**changes, "train_dataloader": {"dataset": dataset}}


def scaled(model: ModelChange, recipe: str) -> ModelChange:
    """Add LayerScale to a model, if the recipe has it."""
    if recipe != "deit3":
        return model
    return lambda backbone, shape: {**model(backbone, shape), "init_values": 1e-4}


def variants(family: str, label: str, model: ModelChange) -> list[Variant]:
    """Train a model by every recipe."""
    return [
        Variant(
            f"{family}_{recipe}",
            f"{label}, {name}",
            scaled(model, recipe),
            reference=family == "vit",
            outside=partial(change, recipe=recipe),
            against=(
                *([("the ViT, same recipe", f"vit_{recipe}")] if family != "vit" else ()),
                *([("AdamW, same model", f"{family}_adamw")] if recipe != "adamw" else ()),
            ),
        )
        for recipe, (name, _) in RECIPES.items()
    ]


class Recipes(Baseline):
    """Recipes for small images, which the paper's setting does not have."""

    papers_run = ""


QUESTION = Recipes(
    name="recipes",
    title="Recipes",
    text=__doc__,
    variants=(
        *variants("tokenformer", "TokenFormer", arguments()),
        *variants("vit", "ViT, matched", to_matched_vit),
    ),
    baseline="tokenformer_adamw",
)

if __name__ == "__main__":
    main(QUESTION)
