"""Does the eps of Θ matter for accuracy?

python ablations/eps.py --config configs/cifar10_tiny.py --seeds 3
"""

from tokenformer_vit.experiments.questions import Question, Variant, arguments, pattention

QUESTION = Question(
    name="eps",
    title="eps",
    text=(
        "What Θ adds under its root, relative to the mean square of the scores. It keeps a row of "
        "zeros from giving NaN; the authors' released code has none."
    ),
    variants=(
        Variant("1e-12", "1e-12", pattention(eps=1e-12)),
        Variant("1e-6", "1e-6", arguments()),
        Variant("1e-2", "1e-2", pattention(eps=1e-2)),
    ),
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
