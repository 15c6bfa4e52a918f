"""Measure a trained image classifier: accuracy, per-class metrics, confusion matrix.

A run knows its config; an exported folder or a checkpoint describes its model::

    tokenformer-vit test work_dirs/photos
    tokenformer-vit test work_dirs/photos/epoch_3.pth --data-root other_photos
    tokenformer-vit test configs/digits_demo.py work_dirs/digits_demo/epoch_40.pth
"""

from pathlib import Path

from tokenformer_vit.errors import InputError

from .arguments import Parser, add_run


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit test", description=__doc__)
    add = parser.add_argument
    weights = "run, exported folder, model.safetensors or epoch_*.pth; averaged, if it can be"
    add("words", nargs="+", metavar="[CONFIG] CHECKPOINT", help=weights)
    add_run(parser)
    add("--out", type=Path, help="folder of the results (default: test/ beside the weights)")
    args = parser.parse_intermixed_args(argv)
    if len(args.words) > 2:
        raise InputError(f"{' '.join(args.words)} are more than a config and a checkpoint")

    # Not before: --help needs none of it.
    from tokenformer_vit.training import evaluate
    from tokenformer_vit.training.config import check_folders, load_config
    from tokenformer_vit.training.distributed import is_first, start_processes
    from tokenformer_vit.training.engine import is_main_process

    weights = evaluate.find_test(Path(args.words[-1]))
    config = args.words[0] if len(args.words) == 2 else evaluate.written_config(weights)
    config = config or evaluate.described_config(weights)
    options = {"log_level": "WARNING", **dict(args.cfg_options)}  # a test logs little
    if args.batch_size is not None:
        options["test_dataloader.batch_size"] = args.batch_size
    cfg = load_config(config, options, compile=args.compile)
    place = weights.parent if Path(args.words[-1]).exists() else Path("work_dirs", args.words[-1])
    out = args.out or place / "test"  # a model of this package is only a name
    evaluate.configure_test(cfg, weights, out, args.data_root)
    if is_first(args.launcher):
        check_folders(cfg, ("test_dataloader",))
    cfg.launcher = args.launcher
    start_processes(cfg)
    evaluate.run_test(cfg, dict(args.cfg_options))
    if is_main_process():
        files = ("metrics.json", "per_class.csv", "predictions.csv", "confusion_matrix.png")
        print(f"\nDone. In {out}: {', '.join(name for name in files if (out / name).is_file())}")
