"""Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters.

python ablations/softmax.py --config configs/cifar10_tiny.py --seeds 3
"""

from tokenformer_vit.experiments.questions import Question, Variant, arguments, matched_vit

QUESTION = Question(
    name="softmax",
    title="Θ",
    text=(
        "From ordinary attention, exp with an L1 norm, to the default, GELU with an L2 norm "
        "(arXiv:2410.23168, Table 4). `gelu_l2_post` is the GELU before the norm, which the "
        "authors' language code has and the table has not. The ViT is timm's, of the same width "
        "and depth, with as many parameters; the paper's figure is that of ViT-B/16 by MAE's "
        "recipe, 86.6 M parameters."
    ),
    variants=(
        Variant("softmax", "exp + L1", arguments(theta="softmax"), paper=79.6),
        Variant("gelu_l1", "GELU + L1", arguments(theta="gelu_l1"), paper=81.7),
        Variant("gelu_l2", "GELU + L2", arguments(theta="gelu_l2"), paper=82.5),
        Variant("gelu_l2_post", "L2 after GELU", arguments(theta="gelu_l2_post")),
        Variant("vit", "ViT, matched", matched_vit, paper=82.3, reference=True),
    ),
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
