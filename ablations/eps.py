"""Does the eps of Θ matter for accuracy?

Θ adds eps under its root, relative to the mean square of the scores. Without eps, a row of zeros
gives NaN. The authors' released code has none.
"""

from tokenformer_vit.experiments import Steps, Variant, arguments, main, pattention_args

QUESTION = Steps(
    name="eps",
    title="eps",
    text=__doc__,
    variants=(
        Variant("1e-12", "1e-12", pattention_args(eps=1e-12)),
        Variant("1e-6", "1e-6", arguments()),
        Variant("1e-2", "1e-2", pattention_args(eps=1e-2)),
    ),
)

if __name__ == "__main__":
    main(QUESTION)
