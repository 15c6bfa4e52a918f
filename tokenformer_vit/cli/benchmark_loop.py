r"""Measure the parts of a training step, with the trainer of a config.

A training as by ``tokenformer-vit train`` runs for some steps, with all hooks of the config but
without validation and checkpoints. It runs twice: with synthetic images, which are in memory and
are not augmented, and with the config's own data, if they are there::

    tokenformer-vit benchmark --loop configs/digits_demo.py
    tokenformer-vit benchmark --loop configs/imagenet_base.py --amp --data-root data/imagenet
    torchrun --nproc_per_node=2 --no-python tokenformer-vit benchmark --loop imagenet_base \
        --launcher pytorch

A step has these parts: data (the loop waits for a batch), copy (to the device), preprocess
(normalise and mix images), forward_backward, optimizer, ema (weight averaging) and hooks (the
rest). On a GPU they are measured by events, without a synchronisation. The keys of the record are
described in tokenformer_vit/training/loop_speed.py.

With ``--small-tensors``, the model has as many tensors as before, but each is small. What a step
then takes outside the forward and the backward pass is its fixed cost.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from tokenformer_vit.command_line import command_parser, typed_command, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.records import device_in_name, environment, write_record


def main(path: str, argv: Sequence[str]) -> None:
    """Run the command.

    Args:
        path: Config, or the name of a shipped one.
        argv: The other words of the command line.

    Raises:
        InputError: If there are neither images nor other data to measure with.
    """
    from tokenformer_vit.training import config  # isort: skip  # says why, if mmengine fails

    from mmengine.dist import get_world_size, is_main_process

    from tokenformer_vit.training import loop_speed, synthetic
    from tokenformer_vit.training.launch import config_explained
    from tokenformer_vit.training.processes import start_processes

    parser = command_parser(__doc__)
    parser.prog += " --loop CONFIG"
    config.add_run_arguments(parser)
    add = parser.add_argument
    add("--amp", action="store_true", help="train under bfloat16 autocast")
    add("--small-tensors", action="store_true", help="measure the fixed cost of a step")
    add("--steps", type=whole_number(1), default=50, metavar="N", help="default: %(default)s")
    add("--warm-up", type=whole_number(1), default=10, metavar="N", help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="default: work_dirs/loop_CONFIG_DEVICE.json")
    args = config.parse_run_arguments(parser, argv)

    cfg = config.load_config(
        path, args.cfg_options, args.data_root, args.batch_size, compile=args.compile
    )
    cfg.launcher = args.launcher
    if args.amp:
        cfg.optim_wrapper.type = "AutocastOptimWrapper"
    with config_explained(cfg):
        configs = {}
        if args.small_tensors:
            synthetic.shrink(cfg)
        elif args.data_root or loop_speed.has_data(cfg):
            config.check_data_folders(cfg, ("train_dataloader",))
            configs["real"] = cfg
        start_processes(cfg)
        if cfg.model.get("head"):
            steps = args.warm_up + args.steps
            random = synthetic.with_synthetic_images(cfg, steps, get_world_size())
            configs = {"synthetic": random, **configs}
    if not configs:
        raise InputError(
            f"{path} trains a language model, and its data {cfg.train_dataloader.dataset.data_root}"
            " are not there: give --data-root"
        )
    device = device_in_name("cuda" if torch.cuda.is_available() else "cpu")
    small = "_small_tensors" if args.small_tensors else ""
    name = f"loop_{Path(path).stem}{small}_{device}.json"
    out = args.out or Path("work_dirs", name)
    if is_main_process():
        out.parent.mkdir(parents=True, exist_ok=True)
    runs = []
    for data, own in configs.items():
        record = loop_speed.measure_loop(own, args.warm_up, args.steps)
        runs += [{"data": data, **run} for run in record["runs"]]
        if is_main_process():
            print(f"{loop_speed.table(runs[-1], record['unit'])}\n")
            common = {"command": typed_command(), **environment()}
            write_record(out, common | record | {"small_tensors": args.small_tensors, "runs": runs})
    if is_main_process():
        print(f"Done. Record: {out}")
