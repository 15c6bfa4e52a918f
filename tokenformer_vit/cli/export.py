"""Convert a checkpoint: from training to timm, or from timm to mmpretrain.

OUT is a folder for timm and the other commands, with the weights that the run validates (averaged
ones, if it averages) and config.json: architecture, arguments, preprocessing, class names::

    tokenformer-vit export work_dirs/run/epoch_3.pth exported

Or it is a checkpoint for mmpretrain (load_from, init_cfg), from a folder or a checkpoint of timm::

    tokenformer-vit export exported start.pth
"""

from pathlib import Path

import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.models import checkpoints
from tokenformer_vit.vision.prediction import load_for_images

from .arguments import Parser


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit export", description=__doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="IN", help="checkpoint or exported folder")
    add("target", type=Path, metavar="OUT", help="new folder, or file *.pth")
    add("--model", metavar="NAME", help="timm name of the model; default: the name in IN")
    args = parser.parse_args(argv)
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    model = load_for_images(args.model, args.checkpoint)
    if args.target.suffix == ".pth":
        with whole_file(args.target) as file:
            torch.save(checkpoints.mmpretrain_checkpoint(model), file)
    else:
        described = checkpoints.description_of(checkpoints.find_weights(args.checkpoint))
        checkpoints.save_model(model, args.target, facts=described.get("card"))
    print(f"Done: {args.target}")
