"""TokenFormer or ViT at equal cost? Three sizes, three budgets, each at its best learning rate.

A TokenFormer and the ViT of its width and depth with as many weights in its blocks are trained for
as many epochs: with equal training FLOPs. Each budget has a whole learning rate schedule.
"""

from collections.abc import Iterator

from models import base_model, lasting, matched_vit, resized, several
from sweep import Question, Variant, main

SIZES = {"half": 1 / 2, "one": 1, "double": 2}  # of the config's blocks
BUDGETS = {"quarter": 1 / 4, "half": 1 / 2, "all": 1}  # of the epochs


def pairs_of_models() -> Iterator[Variant]:
    """Yield the ViT and the TokenFormer of each size and budget."""
    for size, blocks in SIZES.items():
        deep = resized(lambda sizes, share=blocks: sizes.depth(share))
        for budget, epochs in BUDGETS.items():
            about = f"{blocks:g} × the blocks, {epochs:g} × the epochs"
            whole = () if budget == "all" else ("all",)
            for kind, label, model in (
                ("vit", "ViT", matched_vit),
                ("ours", "TokenFormer", base_model),
            ):
                compare = [f"{kind}_{size}_{each}" for each in whole]
                if kind == "ours":
                    compare.append(f"vit_{size}_{budget}")
                yield Variant(
                    f"{kind}_{size}_{budget}",
                    f"{label}, {about}",
                    several(model, deep, lasting(epochs)),
                    compare=tuple(compare),
                )


QUESTIONS = (
    Question("budget", "Equal budgets", str(__doc__), tuple(pairs_of_models()), same_size=False),
)

if __name__ == "__main__":
    main(QUESTIONS)
