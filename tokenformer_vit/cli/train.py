"""Train a model: from a config, or an image classifier from a folder of images.

A config is your own file, or a config that comes with the package::

    tokenformer-vit train configs/imagenet_base.py

A folder holds one folder of images for each class, directly or within train/ and val/. A first run
needs nothing else; it writes the config that it uses::

    tokenformer-vit train photos
    tokenformer-vit train photos --model vit_tiny_patch16_224 --work-dir work_dirs/photos_vit
    tokenformer-vit train photos --checkpoint work_dirs/run --work-dir work_dirs/photos_tuned
"""

import os
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

from tokenformer_vit.command_line import command_parser, whole_number


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    from tokenformer_vit.training import config  # isort: skip  # says why, if mmengine fails

    from tokenformer_vit.files import locked_folder, remove_leftovers
    from tokenformer_vit.training.folder import Start, configure_folder
    from tokenformer_vit.training.launch import (
        config_explained,
        is_first,
        run_training,
        start_processes,
    )
    from tokenformer_vit.training.reports import ExportHook
    from tokenformer_vit.training.schedule import check_schedule

    parser = command_parser(__doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="config, such as configs/imagenet_base.py, or a folder")
    config.add_run_arguments(parser)
    add("--work-dir", help="folder of the results (default: work_dirs/CONFIG)")
    add(
        "--resume",
        nargs="?",
        const="auto",
        help="continue from the last checkpoint in the work directory, if any, or from this file",
    )
    add("--amp", action="store_true", help="train under bfloat16 autocast")
    add(
        "--auto-scale-lr",
        action="store_true",
        help="scale the learning rate with the images of an optimiser step",
    )
    add("--seed", type=whole_number(0), help="seed of every random generator")
    add("--deterministic", action="store_true", help="use deterministic CUDA kernels")
    first_run = parser.add_argument_group("a folder of images").add_argument
    first_run("--model", metavar="NAME", help="timm model (default: a small TokenFormer)")
    first_run(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="exported folder, or checkpoint, to fine-tune",
    )
    first_run("--freeze", action="store_true", help="train only the head of --checkpoint")
    args = config.parse_run_arguments(parser, argv)

    first = is_first(args.launcher)
    start = Start(args.model, args.checkpoint, args.freeze)
    if Path(args.config).is_dir():
        args.work_dir = args.work_dir or f"work_dirs/{Path(args.config).resolve().name}"
        args.config = configure_folder(args.config, args.work_dir, start, args.resume, first)
    elif start != Start():
        parser.error("--model, --checkpoint and --freeze need a folder of images, not a config")
    options = dict(args.cfg_options or {})
    if args.seed is not None:
        options["randomness.seed"] = args.seed
    cfg = config.load_config(
        args.config, options, args.data_root, args.batch_size, args.work_dir, compile=args.compile
    )
    cfg.launcher = args.launcher
    with config_explained(cfg):
        check_schedule(cfg)
        config.check_data_folders(cfg, ("train_dataloader", "val_dataloader"))
        if args.amp:
            cfg.optim_wrapper.type = "AutocastOptimWrapper"
        if args.auto_scale_lr:
            cfg.auto_scale_lr.enable = True
        if args.deterministic:
            cfg.randomness.deterministic = True
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        tensorboard, backends = {"type": "TensorboardVisBackend"}, cfg.visualizer.vis_backends
        if find_spec("tensorboard") and tensorboard not in backends:
            backends.append(tensorboard)
        config.scale_for_accumulation(cfg)
    work_dir = config.make_work_dir(cfg)
    # One process of a run holds the lock for all of them.
    with locked_folder(work_dir) if first else nullcontext():
        if first:
            remove_leftovers(work_dir)
        config.choose_checkpoint(cfg, args.resume)
        start_processes(cfg)
        runner = run_training(cfg)
    if runner.rank == 0:
        export = next((hook for hook in runner.hooks if isinstance(hook, ExportHook)), None)
        model = f"model.safetensors and config.json ({export.purpose}), " if export else ""
        print(
            f"\nDone. In {runner.work_dir}: {model}curves.png, record.json, checkpoints "
            f"(*.pth), and logs in {Path(runner.log_dir).name}/"
        )
