"""Which Θ? The rows of the paper's Table 4, and a ViT with as many parameters.

From exp with an L1 norm, as in ordinary attention, to the default, GELU with an L2 norm
(arXiv:2410.23168, Table 4). `gelu_l2_post` is the GELU before the norm, as in the authors' language
code; the paper's table does not have it. The ViT is timm's, of the same width and depth, with as
many parameters. The paper's figure for it is ViT-B/16 by MAE's recipe, 86.6 M parameters.
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main, to_matched_vit

QUESTION = Steps(
    name="softmax",
    title="Θ",
    text=__doc__,
    variants=(
        Variant("softmax", "exp + L1", arguments(theta="softmax"), paper=79.6),
        Variant("gelu_l1", "GELU + L1", arguments(theta="gelu_l1"), paper=81.7),
        Variant("gelu_l2", "GELU + L2", arguments(theta="gelu_l2"), paper=82.5),
        Variant("gelu_l2_post", "L2 after GELU", arguments(theta="gelu_l2_post")),
        Variant("vit", "ViT, matched", to_matched_vit, paper=82.3, reference=True),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
