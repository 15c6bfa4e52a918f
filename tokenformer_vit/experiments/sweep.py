"""Train every variant of a question with several seeds: the command line of all questions.

Every run is one process of ``tokenformer-vit train``. Finished runs are skipped, and
interrupted runs are resumed. A failed run is recorded as failed and skipped until --retry-failed.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from tokenformer_vit import cli
from tokenformer_vit.cli.arguments import Parser, add_run, whole_number

from .questions import Question
from .rows import best_lr, by_variant
from .run import Run


def main(question: Question, argv: Sequence[str] | None = None) -> None:
    """Run the command line of a question, and end it in one line."""
    cli.run(lambda words: sweep(question, words), argv)


def sweep(question: Question, argv: Sequence[str] | None = None) -> None:
    """Train the unfinished runs, and record the finished ones.

    Raises:
        InputError: If the sweep cannot be planned, or a record has other settings.
        SystemExit: If a run failed or is not finished.
    """
    from . import tables
    from .estimate import estimate
    from .plan import plan
    from .record import find_record
    from .run import ROOT, shown

    args = parse(question, argv)
    planned = plan(question, args)
    needed = [run.start for run in planned]  # their weights are needed, which no record has
    if question.starts_at_best and len(args.lr or ()) > 1:
        begun = [run for run in _first(planned, args) if run.start is None]
        if not args.dry_run:
            _train(begun, needed, args)
        best = _best_rates(question, begun)
        # A dry run also counts the stages whose start is not trained yet.
        known = {each: lr for each, lr in best.items() if lr is not None or not args.dry_run}
        planned = plan(question, args, known)
    if args.dry_run:
        print(estimate(question, planned, args))
        return
    first = _first(planned, args)
    _train(first, needed, args)
    others = _at_best_rates(question, first, [run for run in planned if run not in first])
    _train(others, needed, args)
    planned = first + others

    records = {run.name: record for run in planned if (record := find_record(run))}
    failed = [name for name, record in records.items() if "failed" in record]
    out = planned[0].out
    print(
        f"{len(records) - len(failed)} of {len(planned)} runs are recorded in {shown(out)}"
        + (f"; failed: {', '.join(failed)} (--retry-failed tries again)" if failed else ""),
        file=sys.stderr,
    )
    if out.resolve().parent == ROOT / "ablations" / "results":
        print("`python ablations/tables.py` renders their table", file=sys.stderr)
    elif records:
        print(f"their table is {shown(tables.write_own(question, out))}", file=sys.stderr)
    if failed or not (args.print_commands or len(records) == len(planned)):
        sys.exit(1)


def _first(planned: Sequence[Run], args: argparse.Namespace) -> list[Run]:
    """Return the runs of the seeds that try every learning rate."""
    return [run for run in planned if args.lr_seeds is None or run.about["seed"] < args.lr_seeds]


def _train(planned: Sequence[Run], needed: Sequence[Run | None], args: argparse.Namespace) -> None:
    """Train the unfinished runs, or print their commands, and record the finished ones.

    Args:
        planned: Runs to train.
        needed: Runs that other runs start from.
        args: Options of the command line.
    """
    from . import launch
    from .record import adopt, collect, find_record

    waiting = []
    for run in planned:
        record = find_record(run)
        if record is not None and "failed" not in record:
            continue
        if run.is_finished:  # a run that had failed may be finished by now
            run.write_config()  # checks that it has these settings
            collect(run)
        elif record is not None and not args.retry_failed:
            continue
        elif run not in needed and (source := adopt(run, args.nproc_per_node or 1)):
            print(f"{run.name}: the same as {source}", file=sys.stderr)
        else:
            waiting.append(run)
    for run in waiting:
        run.write_config()
    if args.print_commands:
        for run in waiting:
            print(shlex.join(["python", *launch.command_of(run, args)]))
    else:
        launch.train(waiting, args)


def _at_best_rates(question: Question, first: Sequence[Run], others: Sequence[Run]) -> list[Run]:
    """Keep the runs of later seeds at the learning rate that was the best of the first seeds.

    A variant keeps none until all runs of its first seeds have ended, and without a finished one.
    """
    best = _best_rates(question, first)
    kept: list[Run] = []
    for run in reversed(others):  # a run comes after the run that it continues
        at_best = run.about["lr"] == best[run.about["variant"]]
        if at_best or any(run is each.start for each in kept):
            kept.append(run)
    return kept[::-1]


def _best_rates(question: Question, runs: Sequence[Run]) -> dict[str, float | None]:
    """Return the best learning rate of each variant.

    It is None until all runs of the variant have ended, and without a finished run.
    """
    from .record import find_record

    found = [(run.about["variant"], find_record(run)) for run in runs]
    unknown = {name for name, record in found if record is None}
    records = [record for _, record in found if record]
    return {
        variant.name: None if variant.name in unknown else best_lr(question.field.measure, own)
        for variant, own in by_variant(question.variants, records).items()
    }


def parse(question: Question, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of a question."""
    parser = Parser(description=question.text)
    add = parser.add_argument
    add("--config", required=True, help="such as configs/cifar10_tiny.py")
    add("--seeds", type=whole_number(1), default=1, metavar="N", help="seeds 0 to N - 1")
    add("--lr", type=float, nargs="+", help="learning rates, each for every variant")
    add(
        "--lr-seeds",
        type=whole_number(1),
        metavar="N",
        help="seeds that try every learning rate; the others train at the best of them, which is "
        "chosen for each variant (default: all seeds)",
    )
    add("--variants", nargs="+", choices=[variant.name for variant in question.variants])
    add_run(parser)
    add("--amp", action="store_true", help="train under bfloat16 autocast")
    add("--nproc-per-node", type=whole_number(1), metavar="N", help="start each run by torchrun")
    add(
        "--jobs",
        type=whole_number(1),
        default=1,
        help="runs at the same time; several GPUs are divided among them",
    )
    add(
        "--print-commands",
        action="store_true",
        help="train nothing: record finished runs, and print the commands of all others",
    )
    add(
        "--dry-run",
        action="store_true",
        help="train nothing: print how many runs are left, and what they cost on this machine",
    )
    add("--retry-failed", action="store_true", help="try failed runs again")
    add(
        "--same-training",
        action="store_true",
        help="keep the runs of earlier versions of the config; give it after an edit that does not "
        "change what is trained, to add seeds or learning rates to a sweep",
    )
    add("--work-dir", help="folder of the runs (default: work_dirs/ablations/QUESTION/CONFIG)")
    add(
        "--out",
        help="folder of the records (default: ablations/results/QUESTION_CONFIG for configs of "
        "this repository, work_dirs/ablations/results/QUESTION_CONFIG for your own)",
    )
    args = parser.parse_args(argv)
    if args.nproc_per_node:
        args.launcher = "pytorch"
    elif args.launcher == "pytorch":
        parser.error("--launcher pytorch needs --nproc-per-node")
    return args
