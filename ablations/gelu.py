"""Does the tanh approximation of GELU cost accuracy?

The exact GELU, as in the authors' code, against its approximation by tanh.
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main

QUESTION = Steps(
    name="gelu",
    title="GELU, exact or by tanh",
    text=__doc__,
    variants=(
        Variant("gelu_l2", "exact (erf)", arguments(theta="gelu_l2")),
        Variant("gelu_tanh_l2", "by tanh", arguments(theta="gelu_tanh_l2")),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
