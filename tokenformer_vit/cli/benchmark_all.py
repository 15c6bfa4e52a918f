r"""Run all that this project measures on a machine, one stage after the other.

The stages are GPU tests, speed against a ViT, trainings on CIFAR-10, language models, the training
loop and a profile::

    tokenformer-vit benchmark --all                          # all stages
    tokenformer-vit benchmark --all --minutes 30             # those that fit into half an hour
    tokenformer-vit benchmark --all --stages speed profile

Each stage is a process with a time limit. Its records are written as it goes. A stage that fails or
runs out of time does not stop the others; the summary says so. Run the same command again for the
stages that are left: stages that are recorded on this device are skipped. The stages of tests and
ablations need a clone; the trainings need CIFAR-10, as parquet files or class folders in
DATA_ROOT/cifar10. On a CPU, the stages run with small shapes, to try them.

For a machine without network: make a folder ready in a clone on a machine that has one, copy the
clone with this folder, run it there, and take the archive of the results back::

    tokenformer-vit benchmark --all --prepare build/gpu_kit --data cifar10
    sh build/gpu_kit/run.sh --minutes 30                     # there, in the root of the clone
    tokenformer-vit benchmark --all --collect build/gpu_kit/results/DEVICE.zip

``--collect`` puts the records where the repository has its records, and renders all tables and
charts from them.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenformer_vit.benchmarking import collect, kit
from tokenformer_vit.benchmarking.run_stages import ROOT, Stages, environment_of_child
from tokenformer_vit.benchmarking.stages import STAGES
from tokenformer_vit.command_line import command_parser, error_line, positive_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.records import device_in_name, environment

from .arguments import choose_device


def main(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        InputError: If it cannot be made ready, run or collected.
        SystemExit: With status 1 if a stage has failed.
    """
    args = _parse(argv)
    if args.prepare:
        lines = kit.prepare(args.prepare, args.data, args.python, args.most_mib, ROOT)
        print("\n".join(lines))
        print(f"There, in the root of the repository: sh {args.prepare / 'run.sh'}")
    elif args.collect:
        _collect(args)
    elif not _run(args):
        sys.exit(1)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(__doc__)
    parser.prog += " --all"
    add = parser.add_argument
    names = list(dict.fromkeys(stage.name for stages in STAGES.values() for stage in stages))
    add("--stages", nargs="+", choices=names, metavar="STAGE", help=f"of {', '.join(names)}")
    add("--minutes", type=positive_number, metavar="M", help="most minutes for all of it")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--data-root", default="data", metavar="FOLDER", help="default: %(default)s")
    add("--out", type=Path, default=Path("work_dirs/all"), help="default: %(default)s")
    add("--retry-failed", action="store_true", help="run stages that failed before again")
    group = parser.add_argument_group("for a machine without network")
    there, either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    either("--prepare", type=Path, metavar="FOLDER", help="make a folder ready")
    there("--data", type=Path, nargs="+", default=[], metavar="FOLDER", help="data sets to copy")
    there("--python", default="3.12", help="Python on the other machine (default: %(default)s)")
    there(
        "--most-mib",
        type=positive_number,
        default=64,
        metavar="M",
        help="most MiB of the clone and the folder (default: %(default)s)",
    )
    either("--collect", type=Path, metavar="ARCHIVE", help="take records in, from DEVICE.zip")
    there("--replace", action="store_true", help="also replace records that have more")
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> bool:
    """Run the stages; return False if one of them has failed.

    Raises:
        InputError: If a stage needs a GPU, or stages cannot run in the folder.
    """
    kind = choose_device(args.device).type
    names = [stage.name for stage in STAGES[kind]]
    for name in args.stages or ():
        if name not in names:
            raise InputError(f"--stages {name} needs a GPU; choose from {', '.join(names)}")
    device = device_in_name(kind)
    # A training of another device must not be taken for one of this device.
    work = args.out / "work" / device
    folder, images = args.out / device, Path(args.data_root, "cifar10")
    if kind == "cpu" or not (images / "train").is_dir():
        images = work / ("cifar10" if kind == "cuda" else "digits")
    words = {"device": device, "records": folder / "records", "work": work}
    words |= {"data": args.data_root, "images": images}
    stages = [stage for stage in STAGES[kind] if stage.name in (args.stages or stage.name)]
    words = {key: str(value) for key, value in words.items()}
    return Stages(stages, folder, words, environment(device=kind)).run(
        args.minutes, args.retry_failed
    )


def _collect(args: argparse.Namespace) -> None:
    """Take the records of a device in, and render the tables and charts.

    Raises:
        InputError: If records cannot be taken in, or tables cannot be rendered from them; then the
            records are as before.
    """
    from .benchmark import chart

    tables = ROOT / "ablations" / "tables.py"
    if not tables.is_file():
        raise InputError(f"{ROOT} has no ablations/tables.py; run this in a clone")
    folder = collect.unpacked(args.collect, ROOT / "build" / "gpu_kit" / "results")
    taken, lines = collect.take(folder, ROOT, args.replace)
    try:
        # It makes everything that is made from records.
        done = subprocess.run(
            [sys.executable, tables],
            cwd=ROOT,
            env=environment_of_child(),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise InputError(
                f"no tables from these records ({error_line(done.stderr, done.returncode)}): "
                f"correct {folder}; the records in the repository are as before"
            )
    except BaseException:  # Ctrl-C, too
        for each in taken:
            each.put_back()
        raise
    for each in taken:
        if "groups" in each.record:
            lines.append(chart(each.path, each.record))
    print("\n".join(lines))
    print("Tables and charts are rendered; `git status` lists the pages that changed.")
