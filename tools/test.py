"""Test a trained image classifier: accuracy, figures for each class, confusion matrix."""

import argparse
import os
from pathlib import Path

# As in tools/train.py: OpenMP's threads spin while they wait, and data loading workers share the
# cores. To be set before PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tokenformer_vit.errors import run_tool


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    from mmengine.config import DictAction

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="config file that the model was trained with")
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="training checkpoint (epoch_*.pth; its averaged weights are tested) or exported "
        "model.safetensors",
    )
    parser.add_argument("--data-root", help="folder that holds val/")
    parser.add_argument("--batch-size", type=int, help="images per process and iteration")
    parser.add_argument(
        "--out", type=Path, help="where the results go (default: test/ beside the checkpoint)"
    )
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="override keys that the config has, such as test_dataloader.num_workers=4",
    )
    parser.add_argument("--launcher", choices=("none", "pytorch", "slurm", "mpi"), default="none")
    # What torch.distributed.launch passes; torchrun sets the variable instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    return args


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = parse_args(argv)
    from mmengine.dist import is_main_process
    from rich.console import Console

    from tokenformer_vit.integrations.config import (
        check_data_folders,
        load_config,
        use_cpu_processes,
    )
    from tokenformer_vit.integrations.evaluation import (
        FILES,
        configure_test,
        print_evaluation,
        run_test,
        write_evaluation,
    )

    options = {"log_level": "WARNING", **(args.cfg_options or {})}  # a test has little to log
    cfg = load_config(args.config, options, args.data_root, args.batch_size)
    check_data_folders(cfg, ("test_dataloader",))
    out = args.out or args.checkpoint.parent / "test"
    configure_test(cfg, args.checkpoint, out)
    cfg.launcher = args.launcher
    use_cpu_processes(cfg)

    evaluation = run_test(cfg)
    if is_main_process():
        print_evaluation(evaluation, Console())
        write_evaluation(evaluation, out)
        print(f"\nDone. In {out}: {', '.join(FILES)}")


if __name__ == "__main__":
    run_tool(main)
