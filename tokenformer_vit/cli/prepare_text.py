"""Turn text into rows of tokens, to train and evaluate language models.

From files of text, .jsonl, .ndjson, .json (also .gz) or .parquet, or folders of them::

    tokenformer-vit prepare-text SOURCE... OUT --tokenizer tokenizer.json --context-length 1024

From a data set of the Hugging Face hub, streamed; here its first 2 billion tokens::

    tokenformer-vit prepare-text --hub Skylion007/openwebtext OUT --limit-tokens 2000000000

Digits and their reversal, the smallest check of language training::

    tokenformer-vit prepare-text --reversal 20000 OUT

A part of the text is held out for validation, or --val names other text. OUT appears only when it
is complete. If interrupted, run the same command again: it resumes, and gives the same files.
"""

import argparse
import hashlib
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenformer_vit.command_line import command_parser, number, printable, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import content_digest

# Names of the files of a tokenizer, in a folder that may also hold a model.
_OF_TOKENIZER = re.compile(r"token|vocab|merges|\.model$")
# Options of some sources: which ones, and the default.
_OF_SOURCES: dict[str, tuple[tuple[str, ...], Any]] = {
    "documents": (("SOURCE", "--val"), "file"),
    "column": (("SOURCE", "--val", "--hub"), "text"),
    "hub_config": (("--hub",), None),
    "hub_revision": (("--hub",), None),
    "split": (("--hub",), "train"),
    "digits": (("--reversal",), 16),
    "seed": (("--reversal",), 0),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    from tokenformer_vit import language  # isort: skip  # says why, if transformers is missing
    from datasets import config
    from datasets import logging as datasets_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    # An error that it logs is also raised, and ends the command in one line.
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would report local files to the hub

    sources, files = _sources(args, language)
    if args.tokenizer == "bytes":
        make_tokenizer = language.byte_tokenizer
    elif args.tokenizer.startswith("bpe:"):
        make_tokenizer = partial(
            language.train_tokenizer,
            language.training_texts(sources, args.limit_tokens),
            int(args.tokenizer.removeprefix("bpe:")),
        )
    else:
        make_tokenizer = partial(language.find_tokenizer, args.tokenizer)
    there = args.target.exists()
    meta = language.prepare_text(
        sources,
        args.target,
        make_tokenizer,
        args.context_length,
        _settings(args, files),
        held_out=bool(args.val or args.val_share),
        limit_tokens=args.limit_tokens,
        shard_tokens=args.shard_tokens,
    )
    for split, counts in meta["splits"].items():
        print(
            f"{split}: {counts['rows']:,} rows of {meta['context_length'] + 1} tokens from "
            f"{counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['tokens']:,} "
            f"tokens ({counts.get('left_over', 0):,} at the end fill no row)"
        )
    print(
        f"{'There already' if there else 'Done'}. In {printable(str(args.target))}: a vocabulary "
        f"of {meta['vocab_size']:,} ({printable(args.tokenizer)})"
    )


def _sources(args: argparse.Namespace, language: ModuleType) -> tuple[list[Any], list[Path]]:
    """Make the sources, and list their files."""
    if args.reversal:
        return [language.reversal_source(args.reversal, args.digits, args.val_share, args.seed)], []
    held_out = [file for path in args.val for file in language.find_files(path, args.target)]
    files = [file for path in args.sources for file in language.find_files(path, args.target)]
    both = {file.resolve() for file in files} & {file.resolve() for file in held_out}
    if both:
        raise InputError(f"{min(both)} is both a source and in --val: remove it from one of them")
    how = (args.documents, args.column, args.val_share)
    sources = [language.file_source(file, *how, split="val") for file in held_out]
    sources += [language.file_source(file, *how) for file in files]
    if args.hub:
        place = (args.hub, args.hub_config, args.split)
        sources.append(language.hub_source(*place, args.column, args.val_share, args.hub_revision))
    return sources, held_out + files


def _settings(args: argparse.Namespace, files: Sequence[Path]) -> dict[str, Any]:
    """Return all settings that change the result."""
    settings = {name: value for name, value in vars(args).items() if name != "target"}
    settings["sources"] = [str(path) for path in args.sources] or [args.hub or "reversal"]
    settings["val"] = [str(path) for path in args.val]
    settings["files"] = _digest(files)
    path = Path(args.tokenizer)
    inside = [file for file in sorted(path.glob("*")) if _OF_TOKENIZER.search(file.name)]
    if known := [file for file in (path, *inside) if file.is_file()]:
        settings["tokenizer_files"] = _digest(known)
    return {name: _plain(value) for name, value in settings.items()}


def _digest(files: Sequence[Path]) -> str:
    """Return a hash of the names and the content of files."""
    contents = "\n".join(f"{file} {content_digest([file])}" for file in files)
    return hashlib.blake2b(os.fsencode(contents), digest_size=8).hexdigest()


def _plain(value: Any) -> Any:
    """Escape bytes of file names that are not UTF-8, because JSON must be UTF-8."""
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("sources", type=Path, nargs="*", metavar="SOURCE", help="file, or folder of files")
    add("target", type=Path, metavar="OUT", help="new folder")
    add(
        "--documents",
        choices=["file", "line"],
        help="what is a document in a text file: the whole file (default), or each line",
    )
    add("--column", metavar="NAME", help="column of the text (default: text)")
    add("--hub", metavar="NAME", help="data set of the Hugging Face hub")
    add("--hub-config", metavar="NAME", help="configuration of the data set")
    add("--hub-revision", metavar="NAME", help="branch, tag or commit")
    add("--split", help="split of --hub (default: train)")
    add(
        "--reversal",
        type=whole_number(2, 10**7),
        metavar="LINES",
        help="draw this number of lines of digits",
    )
    add("--digits", type=whole_number(1), help="digits of --reversal (default: 16)")
    add("--seed", type=whole_number(0), help="seed of --reversal (default: 0)")
    add(
        "--tokenizer",
        default="bytes",
        metavar="WHICH",
        help="bytes (default); bpe:N, trained on the training text to N entries; path of a folder "
        "or file; or a name on the hub",
    )
    add(
        "--context-length",
        type=whole_number(1, 2**31 - 2),  # Arrow counts the N + 1 entries of a row in 32 bits
        metavar="N",
        help="rows have N + 1 tokens (default: 1024; with --reversal, one line)",
    )
    add(
        "--val-share",
        type=number(lambda share: 0 <= share < 1, "a number of at least 0 and below 1"),
        metavar="SHARE",
        help="share that is held out: the end of a file that is one document, or documents that a "
        "hash of their content picks (default: 0.005; 0 for none)",
    )
    add(
        "--val",
        type=Path,
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="hold out these files instead",
    )
    add(
        "--limit-tokens",
        type=whole_number(1),
        metavar="N",
        help="stop at N training tokens (at the next end of a document, or of 8192 characters)",
    )
    add(
        "--shard-tokens",
        type=whole_number(1),
        default=100_000_000,
        metavar="N",
        help="about N tokens a file; an interruption loses no finished file (default: 100 million)",
    )
    args = parser.parse_intermixed_args(argv)
    if bool(args.sources) + bool(args.hub) + bool(args.reversal) != 1:
        last = "; --val takes all paths after it, so put it last" if args.val else ""
        parser.error(f"give SOURCE... OUT, or --hub NAME OUT, or --reversal LINES OUT{last}")
    source = "--hub" if args.hub else "--reversal" if args.reversal else "SOURCE"
    for name, (sources, default) in _OF_SOURCES.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif {source, "--val" if args.val else source}.isdisjoint(sources):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} is for {' or '.join(sources)}, not for {source}: leave it out")
    if args.val and args.val_share is not None:
        parser.error("--val and --val-share exclude each other; give one of them")
    if args.val_share is None:
        args.val_share = 0.0 if args.val else 0.005
    if re.fullmatch(r"bpe:(?!\d{1,9}$).*", args.tokenizer, re.DOTALL):
        parser.error(f"--tokenizer {args.tokenizer}: N of bpe:N must be a whole number below 10⁹")
    if args.reversal:
        _check_reversal(parser, args)
    args.context_length = args.context_length or 1024
    return args


def _check_reversal(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    line = 2 * args.digits + 2
    args.context_length = args.context_length or line
    if args.digits > 18:
        parser.error(f"--digits must be at most 18, but got {args.digits}")
    if args.tokenizer != "bytes" or args.val or args.limit_tokens:
        parser.error("--reversal uses bytes; leave out --tokenizer, --val and --limit-tokens")
    if args.context_length % line:
        parser.error(
            f"--context-length {args.context_length}: give a multiple of {line}, the bytes of a "
            "line of --reversal: each row must begin with a line"
        )
