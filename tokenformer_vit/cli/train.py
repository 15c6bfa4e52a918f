"""Train a model: from a config, or an image classifier from a folder of images.

A config is your own file, or a config that comes with the package::

    tokenformer-vit train configs/imagenet_base.py

A folder holds one folder of images for each class, directly or within train/ and val/. A first run
needs nothing else; it writes the config that it uses::

    tokenformer-vit train photos
    tokenformer-vit train photos --model vit_tiny_patch16_224 --work-dir work_dirs/photos_vit
    tokenformer-vit train photos --checkpoint work_dirs/run --work-dir work_dirs/photos_tuned
"""

import copy
import os
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from tokenformer_vit.command_line import command_parser, whole_number


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    from tokenformer_vit.training import config  # isort: skip  # says why, if mmengine fails

    from tokenformer_vit.errors import InputError
    from tokenformer_vit.files import locked_folder, remove_leftovers
    from tokenformer_vit.training.folder import Start, configure_folder
    from tokenformer_vit.training.identity import keep_samples
    from tokenformer_vit.training.launch import ConfigHook, config_explained, run_training
    from tokenformer_vit.training.processes import (
        check_last_checkpoints,
        from_first,
        is_first,
        start_processes,
    )
    from tokenformer_vit.training.reports import ExportHook
    from tokenformer_vit.training.schedule import check_schedule
    from tokenformer_vit.training.shipped import find_config
    from tokenformer_vit.training.storage import load_plain_checkpoint

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
    add(
        "--elastic",
        action="store_true",
        help="let --resume continue with another number of processes: their batch size changes, "
        "and each step takes the same samples",
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
    first_run(
        "--model",
        metavar="NAME",
        help="a TokenFormer, or a ViT of timm (default: a small TokenFormer)",
    )
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
    of_folder = Path(args.config).is_dir()
    if of_folder:
        args.work_dir = args.work_dir or f"work_dirs/{Path(args.config).resolve().name}"
        args.config = configure_folder(args.config, args.work_dir, start, args.resume, first)
    else:
        find_config(args.config, "config or folder")
        if start != Start():
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
        if args.elastic:
            cfg.default_hooks.checkpoint.elastic = True
        if args.amp:
            cfg.optim_wrapper.type = "AutocastOptimWrapper"
        if args.auto_scale_lr:
            if not cfg.get("auto_scale_lr"):
                raise InputError(
                    f"--auto-scale-lr: {args.config} does not say for how many images its learning "
                    "rate is; add auto_scale_lr = dict(base_batch_size=...)"
                )
            cfg.auto_scale_lr.enable = True
        if args.deterministic:
            cfg.randomness.deterministic = True
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
        tensorboard = {"type": "TensorboardVisBackend"}
        backends = cfg.get("visualizer", {}).get("vis_backends", [])
        if backends and find_spec("tensorboard") and tensorboard not in backends:
            backends.append(tensorboard)
    work_dir = config.make_work_dir(cfg)
    start_processes(cfg)
    hooks = []
    with ExitStack() as held:

        def open_run() -> tuple[bool, str | None, int]:
            held.enter_context(locked_folder(work_dir))
            remove_leftovers(work_dir)
            begun = copy.deepcopy(cfg)
            config.choose_checkpoint(cfg, args.resume)
            if of_folder and cfg.resume:
                hooks.append(ConfigHook(begun))
            else:
                with config_explained(cfg):
                    config.write_config(begun, replace=of_folder)
            batch_size = cfg.train_dataloader.batch_size
            if args.elastic and cfg.resume:
                batch_size = keep_samples(load_plain_checkpoint(cfg.load_from), batch_size)
            return cfg.resume, cfg.load_from, batch_size

        # One process holds the lock and chooses for all of them.
        cfg.resume, cfg.load_from, batch_size = from_first(open_run)
        config.set_batch_size(cfg.train_dataloader, batch_size)
        if args.resume == "auto":
            check_last_checkpoints(work_dir)
        runner = run_training(cfg, *hooks)
    if runner.rank == 0:
        export = next((hook for hook in runner.hooks if isinstance(hook, ExportHook)), None)
        model = f"model.safetensors and config.json ({export.purpose}), " if export else ""
        others = [name for name in ("curves.png", "record.json") if (work_dir / name).is_file()]
        print(
            f"\nDone. In {runner.work_dir}: {model}{', '.join([*others, 'checkpoints'])} "
            f"(*.pth), and logs in {Path(runner.log_dir).name}/"
        )
