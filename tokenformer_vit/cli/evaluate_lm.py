"""Evaluate a language model: perplexity of texts, and zero-shot tasks.

Perplexity of text files, or of a folder of tokens that tools/prepare_text.py made::

    python tools/evaluate_lm.py work_dirs/run --text valid.txt test.txt
    python tools/evaluate_lm.py work_dirs/run --data data/tinyshakespeare --split val --stride 512

The six zero-shot tasks of the TokenFormer paper, by lm-evaluation-harness: from local files, or,
without --task-data, from Hugging Face's hub::

    python tools/evaluate_lm.py work_dirs/run --tasks --task-data data/eval
    python tools/evaluate_lm.py work_dirs/run --tasks lambada piqa --task-data data/eval --limit 50

MODEL is a folder with config.json, model.safetensors and the tokenizer: a TokenFormer, or any other
causal language model of transformers. All weights are taken as float32.

The folder --out gets results.json, a record of the run; results.md, the tables as they are printed;
and parts/, what each text and task gave. Interrupted, the same command goes on with those that are
not there; what was measured with another model, data or setting is measured anew.

Beside what every record says (command, commit, date, hardware, versions) results.json holds::

    model, parameters          folder; how many
    dtype                      float32, or "autocast bfloat16"
    n                          texts and tasks
    seed, settings             mask, context, stride, batch_size, limit, device
    texts                      {name: tokens, bytes, words, loss in nats a token, perplexity,
                               bits_per_byte, word_perplexity}; null where not known
    tasks                      {name: n, version, and every metric with its standard error}
    average, average_stderr    mean accuracy of the six tasks, if all were asked
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenformer_vit.command_line import printable, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole
from tokenformer_vit.records import environment, write_record

from .arguments import choose_device

TASKS = ("lambada", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = parse(argv)
    from tokenformer_vit import language  # isort: skip  # says why, if transformers is missing
    from transformers.utils import logging

    from tokenformer_vit.language.evaluation import context_of, float32_head
    from tokenformer_vit.language.published import average, loss_table, zero_shot_table

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device, items = choose_device(args.device), read_tasks(args)
    if not args.mask and (args.model / language.MASKS).is_file():
        print("the model has masks, and all its pairs are read; --mask chooses", file=sys.stderr)
    model = language.load_language_model(args.model, None, args.mask).float().to(device)
    float32_head(model)
    context = context_of(model, args.context)
    stride = args.stride or context
    tokenizer = None
    if args.text or args.tasks:
        path = args.tokenizer or args.model
        tokenizer = language.load_tokenizer(path, model.config.vocab_size)

    out = args.out or args.model / "evaluation"
    (out / "parts").mkdir(parents=True, exist_ok=True)
    same = {
        "model": fingerprint([args.model / "config.json", *args.model.glob("*.safetensors")]),
        "tokenizer": vocabulary(tokenizer),
        "mask": args.mask,
        "context": context,
        "amp": args.amp,
        "device": device.type,
    }
    try:
        texts = measure_texts(args, model, tokenizer, context, stride, out, same)
        tasks = ask_tasks(args, items, model, tokenizer, context, out, same)
    except torch.cuda.OutOfMemoryError as error:
        raise InputError(
            f"the GPU's memory is too small for --batch-size {args.batch_size}: give fewer"
        ) from error

    accuracies = {
        name: (values[metric], values[f"{metric}_stderr"])
        for name, (metric, values) in tasks.items()
    }
    mean = average(accuracies)
    tables = [loss_table(texts)] if texts else []
    if tasks:
        tables.append(zero_shot_table(args.model.resolve().name, accuracies, args.limit))
    write_record(
        out / "results.json",
        {
            "command": shlex.join(["python", *sys.argv]),
            **environment(("torch", "transformers", "tokenizers", "lm_eval"), device.type),
            "model": str(args.model),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
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
            "tasks": {name: values for name, (_, values) in tasks.items()},
            "average": mean and mean[0],
            "average_stderr": mean and mean[1],
        },
    )
    report = "\n\n".join(tables)
    write_whole(out / "results.md", f"{report}\n".encode())
    print(f"{report}\n\nDone. In {printable(str(out))}: results.json, results.md, parts")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        InputError: If there is nothing to evaluate, or a file is not there.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, positive = parser.add_argument, whole_number(1)
    add("model", type=Path, help="folder with config.json and model.safetensors")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file (default: in the model's)")
    add("--mask", metavar="NAME", help="of a model with masks: read the pairs of this one alone")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 texts")
    add("--data", type=Path, metavar="FOLDER", help="tokens that tools/prepare_text.py made")
    add("--split", default="val", help="of --data (default: %(default)s)")
    add(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens from a window to the next; with less than the context, the default, windows "
        "overlap: slower, and a lower perplexity",
    )
    add("--tasks", nargs="*", choices=TASKS, metavar="TASK", help=f"default: {' '.join(TASKS)}")
    add("--task-data", type=Path, metavar="FOLDER", help="items of the tasks (default: the hub)")
    add("--limit", type=positive, metavar="N", help="ask so many items of each task, for a try")
    add("--context", type=positive, metavar="N", help="tokens read at once (default: the model's)")
    add("--batch-size", type=positive, default=8, metavar="B", help="default: %(default)s")
    add("--amp", action="store_true", help="bfloat16 by autocast; logits and losses stay float32")
    add(
        "--seed",
        type=whole_number(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="default: %(default)s",
    )
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--out", type=Path, metavar="FOLDER", help="default: evaluation in MODEL")
    args = parser.parse_args(argv)
    if args.tasks is None:
        args.tasks = ()
    else:
        args.tasks = tuple(dict.fromkeys(args.tasks)) or TASKS
    if not (args.text or args.data or args.tasks):
        raise InputError("there is nothing to evaluate: give --text, --data or --tasks")
    if missing := [file for file in args.text if not file.is_file()]:
        raise InputError(f"there is no file {missing[0]}")
    return args


def measure_texts(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    context: int,
    stride: int,
    out: Path,
    same: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return the losses of all texts, by their names."""
    from tokenformer_vit import language
    from tokenformer_vit.language.data import stored_rows
    from tokenformer_vit.language.evaluation import TextLoss, flatten_rows, measure_text, read_text

    how = {"batch_size": args.batch_size, "amp": args.amp}
    needed = ("tokens", "loss", "perplexity")
    results = {}
    for file in args.text:

        def measure(file: Path = file) -> dict[str, Any]:
            text = read_text(file)
            tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int64)
            found = measure_text(model, tokens, context, stride, title=str(file), **how)
            return TextLoss(*found, len(text.encode()), len(text.split())).values()

        settings = {**same, "stride": stride, "text": fingerprint([file])}
        results[str(file)] = once(part(out, "text", str(file)), settings, needed, measure)
    if args.data:
        title = f"{args.data} {args.split}"

        def measure_split() -> dict[str, Any]:
            rows = stored_rows(language.read_tokens(args.data, args.split))
            counts = language.read_text_meta(args.data)["splits"][args.split]
            tokens = flatten_rows(rows)
            predicted, nats = measure_text(model, tokens, context, stride, title=title, **how)
            # Rows leave out the last few tokens of the text, whose bytes are not known alone.
            size = predicted * counts["bytes"] / counts["tokens"]
            return TextLoss(predicted, nats, size).values()

        language.read_text_meta(args.data)  # says why, if it is no such folder
        if all((path / "tokenizer_config.json").is_file() for path in (args.model, args.data)):
            language.check_tokens_agree(args.model, args.data)
        files = [args.data / "meta.json", *args.data.glob(f"{args.split}-*.arrow")]
        settings = {**same, "stride": stride, "text": fingerprint(files)}
        results[title] = once(part(out, "text", title), settings, needed, measure_split)
    return results


def read_tasks(args: argparse.Namespace) -> dict[str, Any]:
    """Read the items of all tasks, before anything is computed: None for those of the hub."""
    if not args.tasks:
        return {}
    from tokenformer_vit.language.tasks import TASKS as definitions
    from tokenformer_vit.language.tasks import read_items

    folder = args.task_data
    return {name: folder and read_items(definitions[name], folder) for name in args.tasks}


def ask_tasks(
    args: argparse.Namespace,
    items: Mapping[str, Any],
    model: Any,
    tokenizer: Any,
    context: int,
    out: Path,
    same: Mapping[str, Any],
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return of all tasks the name of the metric that counts, and what the harness found."""
    if not args.tasks:
        return {}
    from tokenformer_vit.language.tasks import TASKS as definitions
    from tokenformer_vit.language.tasks import Harness, run_task

    folder = args.task_data
    harness = Harness(model, tokenizer, context, args.batch_size, args.amp)
    results = {}
    for name in args.tasks:
        task = definitions[name]
        settings = {
            **same,
            "items": fingerprint([folder / task.file]) if folder else "hub",
            "limit": args.limit,
            "seed": args.seed,
            "lm_eval": version("lm_eval"),
        }

        needed = ("n", task.metric)

        def ask(name: str = name) -> dict[str, Any]:
            print(f"{name}:", file=sys.stderr)
            try:
                return run_task(harness, name, items[name], args.limit, args.seed)
            except InputError as error:
                raise InputError(f"{name}: {error}") from error

        results[name] = (task.metric, once(part(out, "task", name), settings, needed, ask))
    return results


def once(
    file: Path,
    settings: Mapping[str, Any],
    needed: Iterable[str],
    compute: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return what a file holds, if that was found with the same settings; else find and keep it.

    Args:
        file: Of the part.
        settings: All that the values follow from.
        needed: Names of the values that have to be numbers.
        compute: Finds the values.
    """
    from tokenformer_vit.language.schemas import Part, read_json

    # If there is none, or none of ours, it is made anew.
    with suppress(OSError, InputError):
        kept = read_json(file, Part, "a part of the results", "")
        found = [kept["values"].get(name) for name in needed]
        whole = all(value is not None and math.isfinite(value) for value in found)
        if whole and kept["settings"] == settings:
            print(f"from {printable(str(file))}, which an earlier run left", file=sys.stderr)
            return kept["values"]
    values = compute()
    write_record(file, {"settings": settings, "values": values})
    return values


def part(out: Path, kind: str, name: str) -> Path:
    """Name the file of a part's results; texts of one name can lie in several folders."""
    short = name
    if kind == "text":
        short = f"{Path(name).stem}_{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    return out / "parts" / f"{kind}_{short}.json"


def fingerprint(files: Iterable[Path]) -> str:
    """Return a hash of what files hold, in the order of their names.

    Raises:
        OSError: If one cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]


def vocabulary(tokenizer: Any) -> str | None:
    """Return a hash of a tokenizer's entries."""
    if tokenizer is None:
        return None
    entries = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(entries.encode()).hexdigest()[:16]
