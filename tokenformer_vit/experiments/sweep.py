"""Train every variant of a question with several seeds: what the files of the questions share.

Every run is a training of its own by tools/train.py, independent of the others. A finished one is
not run again, an interrupted one goes on from its last checkpoint, and one that failed is recorded
as such and left alone until --retry-failed.

A record, ``OUT/<variant>_seed<k>.json``, holds that of the training (``record.json``) and::

    question, variant, label
    paper                 the paper's top-1 on ImageNet-1K at base size, or null
                          (of language runs always null)
    config, seed, lr
    parameters
    trainable             how many of them; and start, the file of the weights and its digest: where
                          trained weights are tuned
    options               what the variant changes of the config
    base                  the config's content, and that of the weights or of the run from whose
                          end it starts, as a short digest
    settings              all that the run differs in from it
    command               of the sweep; training_command is that of the run
    taken_from            the record of another question, which trained the same before
    failed                the error, where the training came to no end
    final, best           {top1, top5} in %, of the last epoch and of the best; of language
                          {perplexity, and perplexity/<text> where there are several}
    validation            {epoch, top1}: lists; and flops, what training has cost by then, where
                          that is asked about; of language {iteration, perplexity, ..., flops}
    loss                  {iteration, loss}: lists of at most 100 points
    diagnostics           {epoch, layers: lists}, and of each figure of DiagnosticsHook a list of
                          lists: by epoch, 0 being the start, and by layer; tau where it is learned
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

# As in tools/train.py: threads that wait should not spin. To be set before PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tokenformer_vit.command_line import positive_number, run_tool, whole_number

from .questions import Question


def main(question: Question, argv: Sequence[str] | None = None) -> None:
    """Run the command line of a question; what the user can put right ends in one line."""
    run_tool(lambda: sweep(question, argv))


def sweep(question: Question, argv: Sequence[str] | None = None) -> None:
    """Train what is not trained yet, and record what is."""
    from tokenformer_vit.training import config  # isort: skip  # says why, if mmengine fails
    from . import execution
    from .plans import plan
    from .recording import adopt, collect, read_record
    from .runs import prepare, shown

    args = parse(question, config, argv)
    planned = plan(question, args)
    needed = [run.start for run in planned]  # with their weights, which no record has
    waiting = []
    for run in planned:
        record = read_record(run)
        if record is not None and "failed" not in record:
            continue
        if run.is_finished:  # one that had failed, too, may be by now
            prepare(run)  # sees that it is of these settings
            collect(run)
        elif record is not None and not args.retry_failed:
            continue
        elif run not in needed and (source := adopt(run, args.nproc_per_node or 1)):
            print(f"{run.name}: the same as {source}", file=sys.stderr)
        else:
            waiting.append(run)
    for run in waiting:
        prepare(run)
    if args.print_commands:
        for run in waiting:
            print(shlex.join(["python", *execution.arguments(run, args)]))
    else:
        execution.train(waiting, args)

    records = {run.name: read_record(run) for run in planned}
    failed = [name for name, record in records.items() if record and "failed" in record]
    finished = len([record for record in records.values() if record]) - len(failed)
    print(
        f"{finished} of {len(planned)} runs are recorded in {shown(planned[0].out)}"
        + (f", and failed: {', '.join(failed)} (--retry-failed tries again)" if failed else "")
        + ("" if args.out else "; `python ablations/tables.py` renders them"),
        file=sys.stderr,
    )
    if failed or not (args.print_commands or all(records.values())):
        sys.exit(1)


def parse(question: Question, config: Any, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line of a question.

    Args:
        question: What is asked.
        config: The module ``tokenformer_vit.training.config``.
        argv: The words, ``None`` for ``sys.argv[1:]``.
    """
    parser = argparse.ArgumentParser(description=f"{question.title}. {question.text}")
    parser.add_argument("--config", required=True, help="such as configs/cifar10_tiny.py")
    parser.add_argument(
        "--seeds", type=whole_number(1), default=1, metavar="N", help="seeds 0 to N - 1"
    )
    parser.add_argument(
        "--lr", type=positive_number, nargs="+", help="learning rates, each for every variant"
    )
    parser.add_argument(
        "--variants", nargs="+", choices=[variant.name for variant in question.variants]
    )
    config.add_run_arguments(parser)
    parser.add_argument("--amp", action="store_true", help="train under bfloat16 autocast")
    parser.add_argument(
        "--nproc-per-node", type=whole_number(1), metavar="N", help="start each run by torchrun"
    )
    parser.add_argument(
        "--jobs",
        type=whole_number(1),
        default=1,
        help="runs at the same time; several GPUs are dealt out to them",
    )
    parser.add_argument(
        "--print-commands",
        action="store_true",
        help="train nothing; record the runs that are finished, print the commands of the others "
        "(those that failed among them)",
    )
    parser.add_argument("--retry-failed", action="store_true", help="try failed runs again")
    parser.add_argument(
        "--work-dir", help="where the runs go (default: work_dirs/ablations/QUESTION/CONFIG)"
    )
    parser.add_argument(
        "--out", help="folder of the records (default: ablations/results/QUESTION_CONFIG)"
    )
    args = config.parse_run_arguments(parser, argv)
    if args.nproc_per_node:
        args.launcher = "pytorch"
    elif args.launcher == "pytorch":
        parser.error("--launcher pytorch needs --nproc-per-node")
    return args
