"""Turn text into tokens, to train and evaluate language models.

From files of text, .jsonl, .ndjson, .json, .csv or .parquet (also .gz, .zst), or folders of them::

    tokenformer-vit prepare-text SOURCE... OUT --tokenizer tokenizer.json --context-length 1024

From a data set of the Hugging Face hub; with --limit-tokens it is streamed, not downloaded::

    tokenformer-vit prepare-text --hub Skylion007/openwebtext OUT --limit-tokens 2000000000

Digits and their reversal, the smallest check of language training::

    tokenformer-vit prepare-text --reversal 20000 OUT

A part of the text is held out for validation, or --val names other text. OUT appears when it is
complete. If interrupted, run the same command again: datasets keeps what is tokenized in its cache.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenformer_vit.errors import InputError

from .arguments import Parser, whole_number


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    from datasets import config
    from transformers.utils import logging

    from tokenformer_vit.language import data

    logging.set_verbosity_error()
    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would report local files to the hub
    texts, val_texts = _texts(args)
    meta = data.prepare_text(
        texts,
        args.target,
        _tokenizer(args, texts),
        args.context_length,
        0.0 if val_texts else args.val_share,
        val_texts=val_texts,
        limit_tokens=args.limit_tokens,
        workers=args.workers,
        about={
            "tokenizer": args.tokenizer,
            "sources": [args.hub or "reversal"]
            if not args.sources
            else list(map(str, args.sources)),
        },
    )
    for split, counts in meta["splits"].items():
        print(
            f"{split}: {counts['tokens']:,} tokens of {counts['documents']:,} documents, "
            f"{counts['bytes']:,} bytes"
        )
    print(f"Done. In {args.target}: a vocabulary of {meta['vocab_size']:,} ({args.tokenizer})")


def _texts(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Open the text, and the text of --val."""
    from tokenformer_vit.language import data

    if args.reversal:
        train, val = data.reversal_texts(args.reversal, args.digits, args.val_share, args.seed)
        return [train], [val] if args.val_share else []
    streaming = args.limit_tokens is not None
    how = {"column": args.column, "documents": args.documents, "streaming": streaming}
    files, held_out = (
        [file.resolve() for path in paths for file in data.find_files(path)]
        for paths in (args.sources, args.val)
    )
    if both := set(files) & set(held_out):
        raise InputError(f"{min(both)} is both a source and in --val: remove it from one of them")
    texts = data.load_files(files, **how)
    if args.hub:
        place = {"name": args.hub_config, "split": args.split, "revision": args.hub_revision}
        texts.append(data.load_texts(args.hub, args.column, streaming=streaming, **place))
    return texts, data.load_files(held_out, **how)


def _tokenizer(args: argparse.Namespace, texts: Sequence[Any]) -> Any:
    from tokenformer_vit import language
    from tokenformer_vit.language.data import training_texts

    if args.tokenizer == "bytes":
        return language.byte_tokenizer()
    if args.tokenizer.startswith("bpe:"):
        some = training_texts(texts, args.val_share, min(2**30, args.limit_tokens or 2**30))
        return language.train_tokenizer(some, int(args.tokenizer.removeprefix("bpe:")))
    return language.load_tokenizer(args.tokenizer)


def _share(text: str) -> float:
    if 0 <= float(text) < 1:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0 and below 1")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokenformer-vit prepare-text", description=__doc__)
    add, positive = parser.add_argument, whole_number(1)
    add("sources", type=Path, nargs="*", metavar="SOURCE", help="file, or folder of files")
    add("target", type=Path, metavar="OUT", help="new folder")
    add(
        "--documents",
        choices=["file", "paragraph", "line"],
        default="file",
        help="what is a document in a text file (default: the whole file, read into memory)",
    )
    add("--column", default="text", metavar="NAME", help="column of the text (default: text)")
    add("--hub", metavar="NAME", help="data set of the Hugging Face hub")
    add("--hub-config", metavar="NAME", help="configuration of the data set")
    add("--hub-revision", metavar="NAME", help="branch, tag or commit")
    add("--split", default="train", help="split of --hub (default: train)")
    add("--reversal", type=whole_number(2), metavar="LINES", help="draw lines of digits")
    add("--digits", type=int, choices=range(8, 19), default=16, help="of --reversal (default: 16)")
    add("--seed", type=whole_number(0), default=0, help="of --reversal (default: 0)")
    add(
        "--tokenizer",
        default="bytes",
        metavar="WHICH",
        help="bytes (default); bpe:N, trained on the training text to N entries; path of a folder "
        "or file; or a name on the hub",
    )
    add(
        "--context-length",
        type=positive,
        metavar="N",
        help="training reads rows of N + 1 tokens (default: 1024; with --reversal, one line)",
    )
    add(
        "--val-share",
        type=_share,
        default=0.005,
        metavar="SHARE",
        help="share that is held out: the end of each long text file, or documents that a hash of "
        "their content picks (default: 0.005; 0 for none)",
    )
    add(
        "--val",
        type=Path,
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="hold out these files instead",
    )
    add("--limit-tokens", type=positive, metavar="N", help="stop at N training tokens")
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: 1)")
    args = parser.parse_intermixed_args(argv)
    if bool(args.sources) + bool(args.hub) + bool(args.reversal) != 1:
        last = "; --val takes all paths after it, so put it last" if args.val else ""
        parser.error(f"give SOURCE... OUT, or --hub NAME OUT, or --reversal LINES OUT{last}")
    line = 2 * args.digits + 2
    if args.reversal and (args.tokenizer != "bytes" or (args.context_length or line) % line):
        parser.error(
            f"--reversal needs --tokenizer bytes and a --context-length that is a multiple of "
            f"{line}, the bytes of a line: each row must begin with a line"
        )
    args.context_length = args.context_length or (line if args.reversal else 1024)
    return args
