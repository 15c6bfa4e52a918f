"""Models that start from others: masked autoencoders, trained on other images, or converted."""

import copy
import inspect
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from growth import at_start
from models import (
    PAIRS,
    Config,
    Sizes,
    arguments,
    base_model,
    factory,
    flops,
    hook,
    lasting,
    matched_vit,
    several,
    sizes_of,
)
from nested import SMALLER, nested
from sweep import Question, Variant, main

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import description_of
from tokenformer_vit.training.config import read_config
from tokenformer_vit.training.models.backbone import TimmClassificationBackbone

MAE = """Does pre-training by masked images (MAE) help a TokenFormer, with all labels and a tenth?

Pre-training (arXiv:2111.06377) has five times the epochs of the config, and so has fine-tuning with
a tenth of the labels. The same model from scratch has as many epochs as both together."""
TUNING = """What to train of a model that was trained on other data? Appended pairs, LoRA, the rest?

LoRA on every linear layer of the ViT has as many parameters as appended pairs. All seeds share a
TokenFormer `large_seedN` and beside it a ViT `vit_seedN`: both trained on CIFAR-10, by
`python ablations/growth.py growth --config configs/cifar10_micro.py --variants large vit`, or one
made from the other by `tokenformer-vit convert`."""
CONVERTED = """Does a converted ViT grow better than the ViT, with as many pairs as hidden neurons?

The models of `tuning`, with their heads, are trained further on the images that they know, for as
many epochs each. The new neurons (Net2Net) and pairs are as many as the ViT has neurons. Give one
--lr: images that are held out of this training were not held out of theirs."""
CUTTING = """Can a converted ViT be cut to fewer pairs, with and without training at all sizes?

It is trained further; then *nested* trains it for as many epochs, the most used pairs first. The
others are trained further for as long as both. Give one --lr, as for `converted`."""
DISTILLED = """Does a TokenFormer learn more from a trained ViT than from a longer training?

The ViT is that of `tuning`. Labels alone train for as many more epochs as its predictions cost,
which the FLOPs of the table leave out."""

TIMES = 5  # epochs of pre-training, and of fine-tuning with few labels, in those of the config


def pretrain(cfg: Config, sizes: Sizes) -> None:
    """Train the encoder as the shipped config does, with the norm before the pooling."""
    recipe = read_config("mae_cifar10_micro_pretrain").to_dict()
    backbone = {**cfg["model"]["backbone"], "checkpoint_path": "", "global_pool": "token"}
    recipe["model"]["backbone"] = backbone
    recipe["optim_wrapper"]["optimizer"]["lr"] = cfg["optim_wrapper"]["optimizer"]["lr"]
    recipe["val_dataloader"]["dataset"]["data_root"] = cfg["val_dataloader"]["dataset"]["data_root"]
    recipe["train_cfg"]["max_epochs"] = TIMES * cfg["train_cfg"]["max_epochs"]
    cfg |= {**recipe, "train_dataloader": cfg["train_dataloader"]}


@factory
def classify(cfg: Config, sizes: Sizes, share: float, scratch: bool) -> None:
    """Train a classifier on a share of the labels."""
    times = (1 if share == 1 else TIMES) + (TIMES if scratch else 0)
    cfg["train_cfg"]["max_epochs"] *= times
    cfg["train_dataloader"]["dataset"]["share"] = share
    if scratch:
        cfg["model"]["backbone"]["checkpoint_path"] = ""
        cfg["optim_wrapper"]["paramwise_cfg"]["layer_decay_rate"] = 1.0
    else:
        cfg["model"]["backbone"]["global_pool"] = "avg"  # with a new norm after it


def with_mae() -> Iterator[Variant]:
    """Yield both models, pre-trained and from scratch."""
    for kind, label, model in (("ours", "TokenFormer", base_model), ("vit", "ViT", matched_vit)):
        mae = f"{kind}_mae"
        yield Variant(mae, f"{label}, MAE", several(model, pretrain), prepares=True)
        for (labels, share), start in product((("all", 1.0), ("tenth", 0.1)), (None, mae)):
            way, how = ("mae", "MAE") if start else ("scratch", "from scratch")
            name, text = f"{kind}_{way}_{labels}", f"{label}, {how}, {share:.0%} of the labels"
            others = (f"{kind}_scratch_{labels}", f"vit_{way}_{labels}")
            compare = tuple(other for other in others if other != name)
            change = several(base_model if start else model, classify(share, scratch=not start))
            yield Variant(name, text, change, start, compare)


def saved(backbone: Config, path: Path) -> Config:
    """Return a backbone with the model of a file of weights, as config.json beside it describes.

    Other arguments of the config's model, such as rates of drop path, are left out.
    """
    if not (model := description_of(path)):
        raise InputError(f"{path} has no config.json beside it that describes its model")
    own = inspect.signature(TimmClassificationBackbone).parameters
    kept = {key: value for key, value in backbone.items() if key in own or key == "type"}
    new = {"model_name": model["architecture"], **model["model_args"], "checkpoint_path": str(path)}
    return {**kept, **new}


def trained(cfg: Config) -> Config:
    """Return the backbone of a config, with the model of its weights to tune."""
    path = Path(cfg["model"]["backbone"].get("checkpoint_path") or "no file")
    if not path.is_file():
        raise InputError(
            f"there are no weights to tune ({path}): a command in --help makes them, or set "
            "--cfg-options model.backbone.checkpoint_path=..."
        )
    backbone = cfg["model"]["backbone"] = saved(cfg["model"]["backbone"], path)
    cfg["model"]["head"]["in_channels"] = backbone["embed_dim"]
    return backbone


def vit(cfg: Config, sizes: Sizes) -> None:
    """Use the ViT beside the TokenFormer's weights."""
    folder = Path(trained(cfg)["checkpoint_path"]).parent
    variant, _, seed = folder.name.rpartition("_")
    path = folder.parent / f"vit_{seed}" / "model.safetensors"
    if variant != "large" or not path.is_file():
        raise InputError(f"rename {folder} to large_seedN, beside vit_seedN with the ViT")
    cfg["model"]["backbone"] = saved({**cfg["model"]["backbone"], "growth": None}, path)


@factory
def appended(cfg: Config, sizes: Sizes, rank: int) -> None:
    """Append pairs to each layer by its size, with as many parameters as LoRA of a rank has.

    LoRA has ``rank * (C_in + C_out)`` for each of the four linear layers of a block of the ViT (C
    to 3C, C to C, C to hidden and back). A pair has 2C.
    """
    hidden = hidden_of(cfg, sizes)
    trained(cfg)
    sizes = sizes_of(cfg)  # not the config's, if the weights are of another model
    width = sizes.embed_dim
    new = round(rank * (8 * width + 2 * hidden) / (2 * width))
    share, total = new / sizes.pairs_of_block, sizes.pairs_of_block + new
    qkv, proj = (sizes.counts[key] + round(share * sizes.counts[key]) for key in PAIRS[:2])
    pairs = dict(zip(PAIRS, (qkv, proj, total - 3 * qkv - proj), strict=True))
    arguments(growth={**pairs, "freeze": "old"})(cfg, sizes)


@factory
def tuned(cfg: Config, sizes: Sizes, **new: Any) -> None:
    """Train the model without new pairs."""
    trained(cfg).update(growth=None, **new)


@factory
def lora(cfg: Config, sizes: Sizes, rank: int) -> None:
    """Put LoRA on every linear layer of the ViT."""
    vit(cfg, sizes)
    targets = [{"type": name} for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    own = {"module": cfg["model"]["backbone"], "alpha": rank, "rank": rank, "targets": targets}
    cfg["model"]["backbone"] = {"type": "LoRABackbone", **own}


def known(cfg: Config, sizes: Sizes) -> None:
    """Keep the trained head as well."""
    cfg["load_from"] = cfg["model"]["backbone"]["checkpoint_path"]


def hidden_of(cfg: Config, sizes: Sizes) -> int:
    """Return the hidden neurons of the ViT beside the weights."""
    cfg = copy.deepcopy(cfg)
    vit(cfg, sizes)
    backbone = cfg["model"]["backbone"]
    return round(backbone.get("mlp_ratio", 4) * backbone["embed_dim"])


def grown(cfg: Config, sizes: Sizes) -> None:
    """Append as many feed-forward pairs at the start as the ViT has hidden neurons."""
    new = hidden_of(cfg, sizes)
    tuned()(cfg, sizes)
    counts = {**sizes_of(cfg).counts}
    at_start(lambda _: counts | {PAIRS[2]: counts[PAIRS[2]] + new})(cfg, sizes)


def widened(cfg: Config, sizes: Sizes) -> None:
    """Double the hidden neurons of the ViT at the start."""
    hidden = hidden_of(cfg, sizes)
    vit(cfg, sizes)
    at_start(lambda _: {"hidden_features": 2 * hidden})(cfg, sizes)


@factory
def own_model(cfg: Config, sizes: Sizes, distilled: bool) -> None:
    """Train the config's own model by labels and by what the ViT beside the weights predicts.

    Or by labels alone, longer: a forward pass of the ViT costs a third of a training step of it.
    """
    other = copy.deepcopy(cfg)
    vit(other, sizes)
    cfg["model"]["backbone"]["checkpoint_path"] = ""
    if distilled:
        teacher = Path(other["model"]["backbone"]["checkpoint_path"]).parent
        how = {"teacher": str(teacher), "labels": "soft"}
        cfg["model"] |= {"type": "DistilledClassifier", "distillation": how}
    else:
        lasting(1 + flops(other) / 3 / flops(cfg))(cfg, sizes)


def whole(cfg: Config, sizes: Sizes) -> None:
    """Train with a learning rate for a whole model; the config's is for few parameters."""
    cfg["optim_wrapper"]["optimizer"]["lr"] = 1e-3


SCRATCH = several(tuned(checkpoint_path=""), whole)
TUNED = (
    Variant("probe", "head alone", tuned(frozen=True), compare=("vit_probe",)),
    Variant("tokens_small", "appended pairs, few", appended(4), compare=("lora_small", "full")),
    Variant("tokens_large", "appended pairs, more", appended(16), compare=("lora_large", "full")),
    Variant("full", "the whole model", several(tuned(), whole), compare=("vit_full",)),
    Variant("scratch", "the whole model, from scratch", SCRATCH),
    Variant("vit_probe", "ViT, head alone", several(vit, arguments(frozen=True))),
    Variant("lora_small", "ViT, LoRA, few", lora(4), compare=("vit_full",)),
    Variant("lora_large", "ViT, LoRA, more", lora(16), compare=("vit_full",)),
    Variant("vit_full", "ViT, the whole model", several(vit, whole)),
)
ON = (
    Variant("grown", "grown", several(grown, known), compare=("same", "vit_net2net")),
    Variant("same", "trained further", several(tuned(), known), compare=("vit_same",)),
    Variant("vit_net2net", "ViT, Net2Net", several(widened, known), compare=("vit_same",)),
    Variant("vit_same", "ViT, trained further", several(vit, known)),
)
CUT_ON = several(tuned(), known, hook("CompressionHook", keep=SMALLER))
CUT = (
    Variant("longer", "trained further", several(CUT_ON, lasting(2))),
    Variant("same", "trained further, half as long", CUT_ON),
    Variant("nested", "then nested", nested(checkpoint_path=""), "same", start_folder="nested"),
    Variant("vit_longer", "ViT, trained further", several(vit, known, lasting(2))),
)
TAUGHT = (
    Variant("distilled", "labels and ViT", own_model(distilled=True), compare=("labels",)),
    Variant("labels", "labels, longer", own_model(distilled=False)),
)
QUESTIONS = tuple(
    Question(name, title, text, tuple(variants), same_size=False, from_scratch=False)
    for name, title, text, variants in (
        ("mae", "Masked autoencoders", MAE, with_mae()),
        ("tuning", "Tuning", TUNING, TUNED),
        ("converted", "Converted ViTs, trained further", CONVERTED, ON),
        ("distilled", "A ViT as teacher", DISTILLED, TAUGHT),
        ("converted_sizes", "Converted ViTs, at smaller sizes", CUTTING, CUT),
    )
)

if __name__ == "__main__":
    main(QUESTIONS)
