"""TokenFormer and ViT by other recipes, and at equal costs."""

from collections.abc import Iterator
from itertools import product

from models import Config, Sizes, base_model, factory, lasting, matched_vit, resized, several
from sweep import Question, Variant, main

RECIPES = """\
Which recipe? The paper's, Muon instead of AdamW, and DeiT III's, for a TokenFormer and a ViT.

*Muon* (arXiv:2502.16982) has steps of AdamW's size for matrices. *DeiT III* (arXiv:2204.07118) is
LAMB, binary cross-entropy on mixed images, LayerScale, and other augmentation."""
BUDGET = """\
TokenFormer or ViT at equal cost? Three sizes, three budgets, each at its best learning rate.

Both have equal training FLOPs. Each budget has a whole learning rate schedule."""


@factory
def optimizer(cfg: Config, sizes: Sizes, name: str) -> None:
    """Use an optimiser with the config's settings; Muon takes matrices alone."""
    cfg["optim_wrapper"]["optimizer"]["type"] = name


def deit3(cfg: Config, sizes: Sizes) -> None:
    """Use the recipe of DeiT III."""
    lamb = {"type": "timm.optim.Lamb", "betas": (0.9, 0.999), "weight_decay": 0.05}
    cfg["optim_wrapper"]["optimizer"].update(lamb)
    model = cfg["model"]
    model["backbone"]["init_values"] = 1e-4  # LayerScale
    model["head"] |= {
        # The steps of LAMB are in proportion to a matrix: a head of zeros would stay there.
        "init_cfg": {"type": "TruncNormal", "layer": "Linear", "std": 0.02},
        "loss": {"type": "BinaryCrossEntropy"},
    }
    mixes = [{"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}]
    model["train_cfg"] = {"augments": mixes}
    blur = {"type": "GaussianBlur", "magnitude_range": (0.1, 2.0), "magnitude_std": "inf"}
    choices = [
        {"type": "v2/Grayscale", "num_output_channels": 3},
        {"type": "v2/RandomSolarize", "threshold": 128, "p": 1.0},
        {**blur, "prob": 1.0},
    ]
    side = sizes.outside["img_size"]
    pipeline = [
        {"type": "LoadImage"},
        {"type": "v2/RandomCrop", "size": side, "padding": side // 8},
        {"type": "v2/RandomHorizontalFlip", "p": 0.5},
        {"type": "RandomChoice", "transforms": [[each] for each in choices]},
        {"type": "v2/ColorJitter", "brightness": 0.3, "contrast": 0.3, "saturation": 0.3},
        {"type": "PackLabels"},
    ]
    # Images in memory are only cropped and flipped.
    cfg["train_dataloader"]["dataset"] |= {"type": "CustomDataset", "pipeline": pipeline}


def by_recipe() -> Iterator[Variant]:
    """Yield both models by each recipe."""
    recipes = (
        ("adamw", "AdamW", optimizer("AdamW")),
        ("muon", "Muon", optimizer("timm.optim.Muon")),
        ("deit3", "DeiT III", deit3),
    )
    models = (("tokenformer", "TokenFormer", base_model), ("vit", "ViT, matched", matched_vit))
    for (kind, label, model), (recipe, text, change) in product(models, recipes):
        others = (f"vit_{recipe}", f"{kind}_adamw")
        name = f"{kind}_{recipe}"
        compare = tuple(other for other in others if other != name)
        yield Variant(name, f"{label}, {text}", several(model, change), compare=compare)


def at_equal_cost() -> Iterator[Variant]:
    """Yield both models for each number of blocks and epochs, in those of the config."""
    blocks = {"half": 1 / 2, "one": 1, "double": 2}
    epochs = {"quarter": 1 / 4, "half": 1 / 2, "all": 1}
    models = (("vit", "ViT", matched_vit), ("ours", "TokenFormer", base_model))
    for size, budget, (kind, label, model) in product(blocks, epochs, models):
        deep = resized(lambda sizes, share=blocks[size]: sizes.depth(share))
        name, others = f"{kind}_{size}_{budget}", (f"{kind}_{size}_all", f"vit_{size}_{budget}")
        yield Variant(
            name,
            f"{label}, {blocks[size]:g} × the blocks, {epochs[budget]:g} × the epochs",
            several(model, deep, lasting(epochs[budget])),
            compare=tuple(other for other in others if other != name),
        )


QUESTIONS = (
    Question("recipes", "Recipes", RECIPES, tuple(by_recipe()), same_size=False, diagnose=True),
    Question("budget", "Equal budgets", BUDGET, tuple(at_equal_cost()), same_size=False),
)

if __name__ == "__main__":
    main(QUESTIONS)
