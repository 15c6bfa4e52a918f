"""TokenFormer or ViT at equal cost? Three sizes, three budgets, each at its best learning rate.

A TokenFormer and the ViT of its width and depth with as many weights in its blocks are trained on
the same images for as many epochs: with equal training FLOPs. The sizes are half of the config's
blocks, all of them, and twice as many. The budgets are a quarter, half and all of the epochs, each
with a whole learning rate schedule. Equal FLOPs are not equal time: minutes are given for both.
"""

from collections.abc import Iterator

from tokenformer_vit.experiments import (
    Budgets,
    ModelChange,
    Part,
    Shape,
    Variant,
    arguments,
    lasting,
    main,
    to_matched_vit,
)

SIZES = {"half": 1 / 2, "one": 1, "double": 2}  # of the config's blocks
BUDGETS = {"quarter": 1 / 4, "half": 1 / 2, "all": 1}  # of the epochs
FULL = "all epochs"


def deep(change: ModelChange, share: float) -> ModelChange:
    """Set the number of blocks, after another change."""

    def changed(backbone: Part, shape: Shape) -> Part:
        backbone = change(backbone, shape)
        return backbone if share == 1 else {**backbone, "depth": max(1, round(share * shape.depth))}

    return changed


def pairs_of_models() -> Iterator[Variant]:
    """Yield the ViT and the TokenFormer of each size and budget."""
    for size, blocks in SIZES.items():
        for budget, epochs in BUDGETS.items():
            outside = None if epochs == 1 else lasting(epochs, "max_epochs")
            about = f"{blocks:g} × the blocks"
            for kind, label, change in (
                ("vit", "ViT", to_matched_vit),
                ("ours", "TokenFormer", arguments()),
            ):
                against = [] if budget == "all" else [(FULL, f"{kind}_{size}_all")]
                if kind == "ours":
                    against.append(("the ViT", f"vit_{size}_{budget}"))
                yield Variant(
                    f"{kind}_{size}_{budget}",
                    f"{label}, {about}, {epochs:g} × the epochs",
                    deep(change, blocks),
                    outside=outside,
                    reference=kind == "vit",
                    against=tuple(against),
                    line=f"{label}, {about}",
                )


QUESTION = Budgets(
    name="budget",
    title="Equal budgets",
    text=__doc__,
    variants=tuple(pairs_of_models()),
    full=FULL,
    measured=tuple(f"ours_{size}_all" for size in SIZES),
)

if __name__ == "__main__":
    main(QUESTION)
