"""Measure a trained image classifier: accuracy, per-class metrics, confusion matrix."""

from pathlib import Path

from tokenformer_vit.training.config import check_folders, load_config
from tokenformer_vit.training.distributed import is_first, start_processes
from tokenformer_vit.training.engine import is_main_process
from tokenformer_vit.training.evaluate import configure_test, run_test

from .arguments import Parser, add_run


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit test", description=__doc__)
    add, weights = parser.add_argument, "exported folder, its model.safetensors, or epoch_*.pth"
    add("config", help="config of the training, such as configs/digits_demo.py")
    add("checkpoint", type=Path, help=f"{weights}, whose averaged weights are tested if it has any")
    add_run(parser)
    add("--out", type=Path, help="folder of the results (default: test/ beside the weights)")
    args = parser.parse_args(argv)

    options = {"log_level": "WARNING", **(args.cfg_options or {})}  # a test logs little
    if args.batch_size is not None:
        options["test_dataloader.batch_size"] = args.batch_size
    cfg = load_config(args.config, options, args.data_root, compile=args.compile)
    if is_first(args.launcher):
        check_folders(cfg, ("test_dataloader",))
    folder = args.checkpoint if args.checkpoint.is_dir() else args.checkpoint.parent
    out = args.out or folder / "test"
    configure_test(cfg, args.checkpoint, out)
    cfg.launcher = args.launcher
    start_processes(cfg)
    run_test(cfg, args.cfg_options)
    if is_main_process():
        files = ("metrics.json", "per_class.csv", "predictions.csv", "confusion_matrix.png")
        print(f"\nDone. In {out}: {', '.join(name for name in files if (out / name).is_file())}")
