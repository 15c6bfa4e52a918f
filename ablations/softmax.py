"""Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters.

From exp with an L1 norm, as in ordinary attention, to the default, GELU with an L2 norm
(arXiv:2410.23168, Table 4). `gelu_l2_post` is the GELU before the norm, as in the authors' language
code; the paper's table does not have it. The ViT is timm's, of the same width and depth, with as
many parameters. The paper's figure for it is ViT-B/16 by MAE's recipe, 86.6 M parameters. Its
LayerNorms have weight and bias. In *LayerNorm frozen*, those of the blocks stay at 1 and 0, which
computes the same as the LayerNorms without parameters of the TokenFormers.
"""

from tokenformer_vit.experiments import (
    Steps,
    Variant,
    arguments,
    main,
    to_matched_vit,
    with_frozen_norms,
)

AGAINST = (("the ViT", "vit"), ("the ViT, LayerNorm frozen", "vit_frozen_norms"))
DEFAULT = ("GELU + L2", "gelu_l2")


def theta(name: str, label: str, paper: float | None = None) -> Variant:
    """Use another Θ."""
    against = AGAINST if name == DEFAULT[1] else (*AGAINST, DEFAULT)
    return Variant(name, label, arguments(theta=name), paper, against=against)


QUESTION = Steps(
    name="softmax",
    title="Θ",
    text=__doc__,
    variants=(
        theta("softmax", "exp + L1", paper=79.6),
        theta("gelu_l1", "GELU + L1", paper=81.7),
        theta("gelu_l2", "GELU + L2", paper=82.5),
        theta("gelu_l2_post", "L2 after GELU"),
        Variant("vit", "ViT, matched", to_matched_vit, paper=82.3, reference=True),
        Variant(
            "vit_frozen_norms",
            "ViT, LayerNorm frozen",
            with_frozen_norms(to_matched_vit),
            reference=True,
        ),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
