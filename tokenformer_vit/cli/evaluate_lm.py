"""Evaluate a language model: perplexity of texts, and the zero-shot tasks of the paper.

Perplexity of text files, or of a folder of tokens that prepare-text made::

    tokenformer-vit evaluate-lm work_dirs/run --text valid.txt test.txt
    tokenformer-vit evaluate-lm work_dirs/run --data data/tinyshakespeare --split val --stride 512

The six zero-shot tasks of the paper, by lm-evaluation-harness, from local files or, without
--task-data, from the Hugging Face hub. `tokenformer-vit lm-eval` runs any other task of the
harness::

    tokenformer-vit evaluate-lm work_dirs/run --tasks --task-data data/eval
    tokenformer-vit evaluate-lm work_dirs/run --tasks lambada piqa --task-data data/eval --limit 50

MODEL is a folder with config.json, model.safetensors and the tokenizer: a TokenFormer, or any other
causal language model of transformers. All weights are converted to float32.

The folder --out gets results.json, a record of the run; results.md, the printed tables; and parts/,
the results of each text and task. If interrupted, run the same command again: it skips what is
finished. Another model, tokenizer, text or setting is measured again.

results.json has what every record has (command, commit, date, hardware, versions), and::

    model, parameters          folder; number of parameters
    dtype                      float32, or "autocast bfloat16"
    n                          number of texts and tasks
    bytes                      bytes of all parameters and buffers
    seed, settings             mask, context, stride, batch_size, limit, device
    texts                      {name: tokens, bytes, words, loss in nats a token, perplexity,
                               bits_per_byte, word_perplexity}; null if not known
    tasks                      {name: n, version, and every metric with its standard error}
    average, average_stderr    mean accuracy of the six tasks, if all were evaluated
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from tokenformer_vit.benchmarking.measures import tensor_bytes
from tokenformer_vit.command_line import command_parser, printable, typed_command, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import content_digest, make_folder, write_whole
from tokenformer_vit.records import environment, write_record

from .arguments import choose_device

TASKS = ("lambada", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")


class _Job(NamedTuple):
    """The evaluation of one text or task.

    Attributes:
        name: Name of the text or task in results.json.
        settings: Settings that change its values, in addition to the settings of all jobs.
        needed: Names of the values that must be numbers.
        compute: Computes the values.
    """

    name: str
    settings: dict[str, Any]
    needed: Sequence[str]
    compute: Callable[[], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse(argv)
    from tokenformer_vit import language  # isort: skip  # says why, if transformers is missing
    from transformers.utils import logging

    from tokenformer_vit.language.evaluation import context_of, float32_head
    from tokenformer_vit.language.published import (
        accuracies_of,
        average,
        loss_table,
        zero_shot_table,
    )

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, items = choose_device(args.device), _read_tasks(args)
    if not args.mask and (args.model / language.MASKS).is_file():
        print(
            "the model has masks, but all pairs are used; choose a mask with --mask",
            file=sys.stderr,
        )
    model = language.load_language_model(args.model, None, args.mask).float().to(device)
    float32_head(model)
    context = context_of(model, args.context)
    stride = args.stride or context
    tokenizer = None
    if args.text or args.tasks:
        path = args.tokenizer or args.model
        tokenizer = language.load_tokenizer(path, model.config.vocab_size)

    out = args.out or args.model / "evaluation"
    make_folder(out / "parts", "--out")
    same = {
        "model": _fingerprint([args.model / "config.json", *args.model.glob("*.safetensors")]),
        "tokenizer": tokenizer and _fingerprint_of(tokenizer),
        "mask": args.mask,
        "context": context,
        "amp": args.amp,
        "device": device.type,
    }
    texts, tasks = (
        {job.name: once(job, out / "parts", {**same, **job.settings}) for job in jobs}
        for jobs in (
            _text_jobs(args, model, tokenizer, context, stride),
            _task_jobs(args, items, model, tokenizer, context),
        )
    )
    accuracies = accuracies_of(tasks)
    mean, mean_stderr = average(accuracies) or (None, None)
    tables = [loss_table(texts)] if texts else []
    if tasks:
        tables.append(zero_shot_table(args.model.resolve().name, accuracies, args.limit))
    write_record(
        out / "results.json",
        {
            "command": typed_command(),
            **environment(("torch", "transformers", "tokenizers", "lm_eval"), device.type),
            "model": str(args.model),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "bytes": tensor_bytes([*model.parameters(), *model.buffers()]),
            "dtype": "autocast bfloat16" if args.amp else "float32",
            "n": len(texts) + len(tasks),
            "seed": args.seed,
            "settings": {
                "mask": args.mask,
                "context": context,
                "stride": stride,
                "batch_size": args.batch_size,
                "limit": args.limit,
                "device": device.type,
            },
            "texts": texts,
            "tasks": tasks,
            "average": mean,
            "average_stderr": mean_stderr,
        },
    )
    report = "\n\n".join(tables)
    write_whole(out / "results.md", f"{report}\n".encode())
    print(f"{report}\n\nDone. In {printable(str(out))}: results.json, results.md, parts")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        InputError: If there is nothing to evaluate, or a file is missing.
    """
    parser = command_parser(__doc__)
    add, positive = parser.add_argument, whole_number(1)
    add("model", type=Path, metavar="MODEL", help="folder with config.json and model.safetensors")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file (default: MODEL)")
    add("--mask", metavar="NAME", help="use only the pairs of this mask")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 text files")
    add("--data", type=Path, metavar="FOLDER", help="folder of tokens that prepare-text made")
    add("--split", default="val", help="split of --data (default: %(default)s)")
    add(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens from one window to the next (default: the context). A smaller stride makes "
        "windows overlap: slower, and a lower perplexity",
    )
    add("--tasks", nargs="*", choices=TASKS, metavar="TASK", help=f"default: {' '.join(TASKS)}")
    add("--task-data", type=Path, metavar="FOLDER", help="items of the tasks (default: the hub)")
    add("--limit", type=positive, metavar="N", help="only the first N items of each task")
    add("--context", type=positive, metavar="N", help="tokens read at once (default: the model's)")
    add("--batch-size", type=positive, default=8, metavar="B", help="default: %(default)s")
    add("--amp", action="store_true", help="bfloat16 by autocast; logits and losses stay float32")
    add("--seed", type=whole_number(0, 2**32 - 1), default=0, metavar="N", help="default: 0")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--out", type=Path, metavar="FOLDER", help="default: evaluation in MODEL")
    args = parser.parse_args(argv)
    args.tasks = () if args.tasks is None else tuple(dict.fromkeys(args.tasks)) or TASKS
    if not (args.text or args.data or args.tasks):
        raise InputError("there is nothing to evaluate: give --text, --data or --tasks")
    if missing := [file for file in args.text if not file.is_file()]:
        raise InputError(f"there is no file {missing[0]}; give existing files with --text")
    return args


def _text_jobs(
    args: argparse.Namespace, model: Any, tokenizer: Any, context: int, stride: int
) -> Iterator[_Job]:
    """Yield a job for each text."""
    from tokenformer_vit import language
    from tokenformer_vit.language.data import stored_rows
    from tokenformer_vit.language.evaluation import TextLoss, flatten_rows, measure_text, read_text

    how = {"batch_size": args.batch_size, "amp": args.amp}
    needed = ("tokens", "loss", "perplexity")
    for file in args.text:

        def measure(file: Path = file) -> dict[str, Any]:
            text = read_text(file)
            tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int64)
            found = measure_text(model, tokens, context, stride, title=str(file), **how)
            return TextLoss(*found, len(text.encode()), len(text.split())).values()

        yield _Job(str(file), {"stride": stride, "text": _fingerprint([file])}, needed, measure)
    if args.data:
        title = f"{args.data} {args.split}"

        def measure_split() -> dict[str, Any]:
            rows = stored_rows(language.open_rows(args.data, args.split))
            counts = language.read_text_meta(args.data)["splits"][args.split]
            tokens = flatten_rows(rows)
            predicted, nats = measure_text(model, tokens, context, stride, title=title, **how)
            # The rows do not have the last few tokens, so the number of bytes is unknown.
            size = predicted * counts["bytes"] / counts["tokens"]
            return TextLoss(predicted, nats, size).values()

        language.read_text_meta(args.data)  # says what is wrong with the folder
        if all((path / "tokenizer_config.json").is_file() for path in (args.model, args.data)):
            language.check_tokens_agree(args.model, args.data)
        files = [args.data / "meta.json", *args.data.glob(f"{args.split}-*.arrow")]
        yield _Job(title, {"stride": stride, "text": _fingerprint(files)}, needed, measure_split)


def _read_tasks(args: argparse.Namespace) -> dict[str, Any]:
    """Read the items of all tasks before anything is computed; None if the hub has them."""
    if not args.tasks:
        return {}
    from tokenformer_vit.language.tasks import TASKS as definitions
    from tokenformer_vit.language.tasks import read_items

    folder = args.task_data
    return {name: folder and read_items(definitions[name], folder) for name in args.tasks}


def _task_jobs(
    args: argparse.Namespace, items: Mapping[str, Any], model: Any, tokenizer: Any, context: int
) -> Iterator[_Job]:
    """Yield a job for each task."""
    if not args.tasks:
        return
    from tokenformer_vit.language.published import METRICS
    from tokenformer_vit.language.tasks import TASKS as definitions
    from tokenformer_vit.language.tasks import Harness, run_task

    folder = args.task_data
    harness = Harness(model, tokenizer, context, args.batch_size, args.amp)
    for name in args.tasks:

        def ask(name: str = name) -> dict[str, Any]:
            print(f"{name}:", file=sys.stderr)
            try:
                return run_task(harness, name, items[name], args.limit, args.seed)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error

        settings = {
            "task": name,
            "items": _fingerprint([folder / definitions[name].file]) if folder else "hub",
            "limit": args.limit,
            "seed": args.seed,
            "lm_eval": version("lm_eval"),
        }
        yield _Job(name, settings, ("n", METRICS[name]), ask)


def once(job: _Job, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an earlier run found with the same settings, or compute them.

    Args:
        job: The text or task.
        folder: Folder of the files with the values.
        settings: All settings that change the values.
    """
    from tokenformer_vit.language.schemas import Part, read_json

    text = json.dumps(settings, sort_keys=True)
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    with suppress(OSError, InputError):  # no such file, or a damaged one
        values = read_json(file, Part, "a part of the results", "")["values"]
        found = [values.get(name) for name in job.needed]
        if all(value is not None and math.isfinite(value) for value in found):
            print(f"read from an earlier run: {printable(str(file))}", file=sys.stderr)
            return values
    values = job.compute()
    write_record(file, {"settings": settings, "values": values})
    return values


def _fingerprint(files: Iterable[Path]) -> str:
    """Return a hash of the content of files, in the order of their names.

    Raises:
        OSError: If a file cannot be read.
    """
    return content_digest(sorted(files))[:16]


def _fingerprint_of(tokenizer: Any) -> str:
    """Return a hash of all that a tokenizer saves: entries, rules, special tokens, truncation."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return _fingerprint(path for path in Path(folder).rglob("*") if path.is_file())
