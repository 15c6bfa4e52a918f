"""Convert a checkpoint: from training to timm, or from timm to mmpretrain.

A folder for timm and the other commands, from any checkpoint of a run::

    tokenformer-vit export work_dirs/run/epoch_3.pth exported

The folder gets model.safetensors (the weights that the run validates: averaged ones, if it
averages) and config.json (architecture, arguments, preprocessing, class names).

A checkpoint for mmpretrain (load_from, init_cfg), from a folder or a checkpoint of timm::

    tokenformer-vit export exported start.pth

OUT appears whole or not at all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenformer_vit.command_line import command_parser
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.mmpretrain_names import classifier_state_dict
from tokenformer_vit.models.checkpoints import (
    DESCRIPTION,
    describe_model,
    load_model,
    read_checkpoint,
    save_model,
)

from .arguments import is_file_name


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="IN", help="checkpoint or exported folder")
    add("target", type=Path, metavar="OUT", help="new folder, or file *.pth")
    add("--model", metavar="NAME", help="timm name of the model; default: the name in IN")
    args = parser.parse_args(argv)
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    if is_file_name(args.target, ".pth"):
        _save_classifier(load_model(args.model, args.checkpoint), args.target)
        print(f"Done. In {args.target}: the state dict of an mmpretrain classifier")
        return
    model = load_model(args.model, args.checkpoint)
    content = read_checkpoint(args.checkpoint) if args.checkpoint.is_file() else {}
    save_model(model, args.target, facts=content.get(DESCRIPTION, {}).get("card"))
    print(f"Done. In {args.target}: model.safetensors, config.json and README.md")


def _save_classifier(model: Any, path: Path) -> None:
    """Write a checkpoint that ``load_from`` and ``init_cfg`` of an mmpretrain classifier read."""
    if not isinstance(getattr(model, "head", None), nn.Linear):
        raise InputError(
            f"{type(model).__name__} has no linear classifier called 'head': export a TokenFormer "
            "or one of timm's ViTs that was trained to classify"
        )
    description = describe_model(model, model.num_classes)
    names = description.get("label_names")
    content = {
        "meta": {"dataset_meta": {"classes": names}} if names else {},
        "state_dict": classifier_state_dict(model.state_dict()),
        DESCRIPTION: description,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        torch.save(content, file)
