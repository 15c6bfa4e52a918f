"""What should τ be: √P, one, or learned?

python ablations/tau.py --config configs/cifar10_tiny.py --seeds 3
"""

from tokenformer_vit.experiments.questions import Question, Variant, arguments, pattention

QUESTION = Question(
    name="tau",
    title="τ",
    text=(
        "Θ multiplies by τ, the root of the number of pairs. With 1 instead the scores that reach "
        "the GELU are small, where it is nearly linear, and the outputs of a layer start smaller, "
        "since the values are drawn for the usual τ. Learned, τ starts from √P, one number a "
        "layer. The paper reports no comparison."
    ),
    variants=(
        Variant("one", "1", pattention(tau=1.0)),
        Variant("root", "√P", arguments()),
        Variant("learned", "learned, from √P", pattention(learn_tau=True)),
    ),
)

if __name__ == "__main__":
    from tokenformer_vit.experiments.sweep import main

    main(QUESTION)
