"""Train a model: from a config, or an image classifier from a folder of images.

A config is your own file, or comes with the package. A folder holds one folder of images for each
class, directly or within train/ and val/; a first run needs nothing else, and writes a config::

    tokenformer-vit train photos
    tokenformer-vit train photos --checkpoint work_dirs/run --work-dir work_dirs/photos_tuned
"""

import copy
import os
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import locked_folder, make_folder

from .arguments import Parser, add_run, whole_number

_RESULTS = ("model.safetensors", "config.json", "curves.png", "record.json")


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit train", description=__doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="config, such as configs/imagenet_base.py, or a folder")
    add_run(parser)
    add("--epochs", type=whole_number(1), help="length of the run; its schedule is scaled")
    add("--work-dir", help="folder of the results (default: work_dirs/CONFIG)")
    add("--resume", nargs="?", const="auto", help="continue from the last checkpoint, or this one")
    add("--amp", action="store_true", help="train and validate under bfloat16 autocast")
    add("--auto-scale-lr", action="store_true", help="scale the rate with the images of a step")
    add("--seed", type=whole_number(0), help="seed of every random generator")
    add("--deterministic", action="store_true", help="use deterministic CUDA kernels")
    add = parser.add_argument_group("a folder of images").add_argument
    add("--model", metavar="NAME", help="a TokenFormer or ViT (default: a small TokenFormer)")
    add("--checkpoint", type=Path, metavar="FILE", help="trained model to fine-tune")
    add("--freeze", action="store_true", help="train only the head of --checkpoint")
    args = parser.parse_args(argv)

    # Not before: --help needs none of it.
    from tokenformer_vit.training import config, distributed
    from tokenformer_vit.training.engine import broadcast_object_list
    from tokenformer_vit.training.folder import Start, configure_folder
    from tokenformer_vit.training.runner import run_training

    first = distributed.is_first(args.launcher)
    start = Start(args.model, args.checkpoint, args.freeze)
    if own := Path(args.config).is_dir():
        args.work_dir = args.work_dir or f"work_dirs/{Path(args.config).resolve().name}"
        args.config = configure_folder(args.config, args.work_dir, start, args.resume, first)
    elif start != Start():
        raise InputError("--model, --checkpoint and --freeze need a folder of images, no config")
    typed = {"randomness.seed": args.seed, "train_dataloader.batch_size": args.batch_size}
    options = dict(args.cfg_options) | {k: v for k, v in typed.items() if v is not None}
    how = (args.data_root, args.work_dir, args.compile, args.epochs)
    recipe = config.load_recipe(args.config, options, *how)
    if args.amp:
        config.set_autocast(recipe)
    if args.auto_scale_lr:
        if not recipe.get("auto_scale_lr"):
            raise InputError(f"--auto-scale-lr: {args.config} has no auto_scale_lr.base_batch_size")
        recipe.auto_scale_lr.enable = True
    if args.deterministic:
        recipe.randomness.deterministic = True
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    cfg = config.resolve(copy.deepcopy(recipe))
    cfg.launcher = args.launcher
    backends = cfg.get("visualizer", {}).get("vis_backends", [])
    there = any(config.name_of(each.type) == "TensorboardVisBackend" for each in backends)
    if backends and not there and find_spec("tensorboard"):
        backends.append({"type": "TensorboardVisBackend"})
    config.check_config(cfg)
    config.set_precision((cfg.get("optim_wrapper") or {}).get("type"))
    work_dir = Path(cfg.work_dir)
    if first:
        config.check_folders(cfg, ("train_dataloader", "val_dataloader"))
        make_folder(work_dir, "--work-dir")
    distributed.start_processes(cfg)
    # A refused run leaves the file of the former one.
    begin = partial(config.write_config, recipe, replace=own) if first else None
    with locked_folder(work_dir) if first else nullcontext():
        if first:
            config.choose_checkpoint(cfg, args.resume)
        chosen = [cfg.resume, cfg.load_from]
        broadcast_object_list(chosen)
        cfg.resume, cfg.load_from = chosen
        if cfg.resume:
            config.drop_start(cfg.model)
        run_training(cfg, begin)
    if first:
        written = [name for name in _RESULTS if (work_dir / name).is_file()]
        print(f"\nDone. In {work_dir}: {', '.join(written)}, checkpoints (*.pth), and logs")
