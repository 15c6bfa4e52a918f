"""Write a training checkpoint as a folder that timm and the other tools load.

From a checkpoint of a run, also of one that was stopped::

    python tools/export.py work_dirs/run/epoch_3.pth exported

From one that does not describe its model and its images, with the config it was trained with::

    python tools/export.py old/epoch_3.pth exported --config configs/imagenet_base.py

The folder gets model.safetensors (the averaged weights, if the run averaged) and config.json
(architecture, arguments, preprocessing, class names). OUT appears whole or not at all.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.checkpoints import load_model, save_model


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="such as epoch_3.pth")
    parser.add_argument("folder", type=Path, metavar="OUT", help="folder that is made")
    parser.add_argument("--config", metavar="CONFIG", help="config of the training")
    args = parser.parse_args(argv)
    if args.folder.exists():
        raise InputError(f"{args.folder} is there already; name another place, or remove it")
    if args.config is None:
        model: Any = load_model(None, args.checkpoint)
        save_model(model, args.folder, facts=model.card_facts)
    else:
        from tokenformer_vit.training import config  # says why, if mmengine fails
        from tokenformer_vit.training.export import export_checkpoint

        export_checkpoint(config.load_config(args.config), args.checkpoint, args.folder)
    print(f"Done. In {args.folder}: model.safetensors, config.json and README.md")
