"""Turn text into tokens, to train and evaluate language models.

    tokenformer-vit prepare-text SOURCE... OUT --tokenizer tokenizer.json --context-length 1024
    tokenformer-vit prepare-text --hub Skylion007/openwebtext OUT --limit-tokens 2000000000
    tokenformer-vit prepare-text --reversal 20000 OUT

A source is a file of text, .jsonl, .ndjson, .json, .csv or .parquet (also .gz, .zst), or a folder
of them. A text file is one document, unless --documents divides it. The end of each long document
is held out, and of short ones those that a hash of their content picks; or --val names other files.
With --limit-tokens sources are streamed. If interrupted, run the same command again.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from tokenformer_vit import language
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import data

from .arguments import Parser, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit prepare-text", description=__doc__)
    add, positive = parser.add_argument, whole_number(1)
    add("sources", type=Path, nargs="*", metavar="SOURCE", help="file, or folder of files")
    add("target", type=Path, metavar="OUT", help="new folder")
    add("--documents", choices=["file", "paragraph", "line"], default="file", help="of text files")
    add("--column", default="text", metavar="NAME", help="column of the text; default: text")
    add("--hub", metavar="NAME", help="data set of the Hugging Face hub")
    add("--hub-config", metavar="NAME", help="configuration of the data set")
    add("--hub-revision", metavar="NAME", help="branch, tag or commit")
    add("--split", default="train", help="split of --hub; default: train")
    add("--reversal", type=positive, metavar="LINES", help="draw 16 digits and their reversal")
    add("--tokenizer", default="bytes", help="bytes (default), bpe:SIZE, path, or name on the hub")
    add("--context-length", type=positive, metavar="N", help="rows of N + 1 tokens; default: 1024")
    add("--val-share", type=float, default=0.005, metavar="X", help="held out; default: 0.005")
    add("--val", type=Path, nargs="+", default=[], metavar="FILE", help="hold out these instead")
    add("--limit-tokens", type=positive, metavar="N", help="stop at N training tokens")
    add("--workers", type=positive, default=1, metavar="N", help="processes; default: 1")
    args = parser.parse_intermixed_args(argv)
    if bool(args.sources) + bool(args.hub) + bool(args.reversal) != 1:
        parser.error("give SOURCE... OUT, --hub NAME OUT, or --reversal LINES OUT; put --val last")
    if args.reversal and (args.tokenizer != "bytes" or args.context_length not in (None, 34)):
        parser.error("--reversal needs --tokenizer bytes and --context-length 34, a line")
    texts, val_texts = _texts(args)
    length = args.context_length or (34 if args.reversal else 1024)
    how: dict[str, Any] = {"limit_tokens": args.limit_tokens, "workers": args.workers}
    how |= {"val_texts": val_texts, "val_share": 0.0 if val_texts else args.val_share}
    sources = list(map(str, args.sources)) or [args.hub or "reversal"]
    how["about"] = {"tokenizer": args.tokenizer, "sources": sources}
    try:
        meta = data.prepare_text(texts, args.target, _tokenizer(args, texts), length, **how)
    except UnicodeError as error:  # streamed texts are read only now
        raise data.unreadable(", ".join(sources), error) from error
    for split, counts in meta["splits"].items():
        print(f"{split}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}")
    print(f"Done. In {args.target}: a vocabulary of {meta['vocab_size']:,} ({args.tokenizer})")


def _texts(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Open the text, and the text of --val."""
    if args.reversal:
        return [data.reversal_text(args.reversal)], []
    streaming = args.limit_tokens is not None
    how = {"column": args.column, "documents": args.documents, "streaming": streaming}
    files, held_out = data.find_files(args.sources), data.find_files(args.val)
    if both := set(files) & set(held_out):
        raise InputError(f"{min(both)} is both a source and in --val: remove it from one of them")
    texts = data.load_files(files, **how)
    if args.hub:
        place = {"name": args.hub_config, "split": args.split, "revision": args.hub_revision}
        texts.append(data.load_texts(args.hub, args.column, streaming=streaming, **place))
    return texts, data.load_files(held_out, **how)


def _tokenizer(args: argparse.Namespace, texts: list[Any]) -> Any:
    if args.tokenizer == "bytes":
        return language.byte_tokenizer()
    if size := re.fullmatch(r"bpe:(\d+)", args.tokenizer):
        some = data.training_texts(texts, args.val_share, min(2**30, args.limit_tokens or 2**30))
        return language.train_tokenizer(some, int(size[1]))
    return language.load_tokenizer(args.tokenizer)
