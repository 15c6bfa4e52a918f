"""Does pre-training by masked images (MAE) help a TokenFormer, with all labels and with a tenth?

An encoder sees a quarter of the patches of an image and a small decoder draws the others
(arXiv:2111.06377); no labels are used. The encoder is then fine-tuned as a classifier, with layer
decay. It is compared with the same model from scratch: by the same recipe without layer decay, for
as many epochs as pre-training and fine-tuning take together. The ViT is timm's, with as many
parameters.

Pre-training sees all images, for five times the epochs of the config. The models with a tenth of
the labels are fine-tuned for five times the epochs, too.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tokenformer_vit.experiments import (
    ModelChange,
    Part,
    Pretraining,
    Shape,
    Variant,
    arguments,
    main,
    to_matched_vit,
)

PRETRAIN = "configs/mae_cifar10_micro_pretrain.py"
FINETUNE = "configs/mae_cifar10_micro_finetune.py"
TIMES = 5  # epochs of pre-training, and of fine-tuning with few labels, in those of the config
SHARES = {"all": 1.0, "tenth": 0.1}  # of the labels


def fresh(model: ModelChange) -> ModelChange:
    """Start from new weights."""
    return lambda backbone, shape: {**model(backbone, shape), "checkpoint_path": ""}


def encoder(model: ModelChange) -> ModelChange:
    """Start from new weights, with the norm before the pooling as in the pre-training's config."""
    return lambda backbone, shape: {**fresh(model)(backbone, shape), "global_pool": "token"}


def pretrain(shape: Shape, length: int) -> Part:
    """Pre-train as the shipped config does."""
    from tokenformer_vit.experiments.plan import changes_between

    changes = changes_between(FINETUNE, PRETRAIN)
    del changes["model"]["backbone"], changes["train_dataloader"]
    changes["custom_hooks"] = [{"type": "ReconstructionHook"}]
    return {**changes, "train_cfg": {**changes["train_cfg"], "max_epochs": TIMES * length}}


def classify(shape: Shape, length: int, share: float, scratch: bool) -> dict[str, Any]:
    """Train a classifier on a share of the labels."""
    epochs = length if share == 1 else TIMES * length
    decay = {"paramwise_cfg": {"layer_decay_rate": 1.0}}
    return {
        "train_cfg": {"max_epochs": epochs + TIMES * length if scratch else epochs},
        "train_dataloader": {"dataset": {"share": share}},
        **({"optim_wrapper": decay} if scratch else {}),
    }


def variants() -> Iterator[Variant]:
    """Yield both models, pre-trained and from scratch."""
    models = (("ours", "TokenFormer", arguments()), ("vit", "ViT", to_matched_vit))
    for family, label, model in models:
        is_vit = family == "vit"
        mae = f"{family}_mae"
        yield Variant(
            mae, f"{label}, MAE", encoder(model), outside=pretrain, prepares=True, reference=is_vit
        )
        for labels, share in SHARES.items():
            scratch = f"{family}_scratch_{labels}"
            other = (("the ViT", f"vit_scratch_{labels}"),) if family == "ours" else ()
            yield Variant(
                scratch,
                f"{label}, from scratch, {share:.0%} of the labels",
                fresh(model),
                outside=partial(classify, share=share, scratch=True),
                against=other,
                reference=is_vit,
            )
            other = (("the ViT", f"vit_mae_{labels}"),) if family == "ours" else ()
            yield Variant(
                f"{mae}_{labels}",
                f"{label}, MAE, {share:.0%} of the labels",
                arguments(global_pool="avg"),  # with a new norm after it
                outside=partial(classify, share=share, scratch=False),
                start=mae,
                against=(("from scratch", scratch), *other),
                reference=is_vit,
            )


QUESTION = Pretraining(
    name="mae",
    title="Masked autoencoders",
    text=__doc__,
    variants=tuple(variants()),
    measured=(),
)

if __name__ == "__main__":
    main(QUESTION)
