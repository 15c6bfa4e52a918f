"""Evaluate a language model: perplexity of text files, or of tokens that prepare-text made.

    tokenformer-vit evaluate-lm work_dirs/run --text valid.txt test.txt
    tokenformer-vit evaluate-lm work_dirs/run --data data/tinyshakespeare --split val --stride 512

MODEL is a folder with any causal language model of transformers and its tokenizer. Weights are
converted to float32. With a smaller --stride windows overlap: slower, and a lower perplexity. For
tasks such as lambada and hellaswag, see `tokenformer-vit lm-eval`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_vit import language
from tokenformer_vit.errors import InputError
from tokenformer_vit.language.data import open_tokens, read_text_meta, unreadable
from tokenformer_vit.language.evaluation import measure_text, text_values
from tokenformer_vit.language.tokenizers import encode
from tokenformer_vit.records import environment, write_record

from .arguments import Parser, device, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit evaluate-lm", description=__doc__)
    add, positive = parser.add_argument, whole_number(1)
    add("model", type=Path, metavar="MODEL", help="folder with config.json and model.safetensors")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file; default: MODEL")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 text files")
    add("--data", type=Path, metavar="FOLDER", help="folder of tokens that prepare-text made")
    add("--split", default="val", help="split of --data; default: %(default)s")
    add("--context", type=positive, metavar="N", help="tokens read at once; default: the model's")
    add("--stride", type=positive, metavar="N", help="from window to window; default: the context")
    add("--batch-size", type=positive, default=8, metavar="B", help="default: %(default)s")
    add("--amp", action="store_true", help="bfloat16 by autocast; losses stay float32")
    add("--device", type=device, default="auto", help="default: cuda if it is there, else cpu")
    add("--out", type=Path, metavar="FILE", help="default: evaluation.json in MODEL")
    args = parser.parse_args(argv)
    if not (args.text or args.data):
        parser.error("there is nothing to evaluate: give --text or --data")
    model = language.load_language_model(args.model).float().to(args.device)
    most = getattr(model.config, "max_position_embeddings", None)
    context = args.context or most or 1024
    stride = args.stride or context
    limits = f"--stride {stride} <= --context {context} <= {most or context}, the model's context,"
    if not stride <= context <= (most or context):
        raise InputError(f"{limits} does not hold: give smaller numbers")
    texts = {}
    for name, tokens, sizes in [*_texts(args, model.config.vocab_size)]:
        how = {"batch_size": args.batch_size, "amp": args.amp, "title": name}
        values = text_values(*measure_text(model, tokens, context, stride, **how), *sizes)
        found = (f"{key} {value:.5g}" for key, value in values.items() if value is not None)
        print(name, *found, sep="\t")
        texts[name] = values
    out = args.out or args.model / "evaluation.json"
    record = {**environment(args.device.type), "model": str(args.model)}
    record |= {"parameters": model.num_parameters(), "context": context, "stride": stride}
    write_record(out, {**record, "amp": args.amp, "texts": texts})
    print(f"Done. In {out}: a record")


def _texts(args: argparse.Namespace, vocab_size: int) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the name and the tokens of each text, and its numbers of bytes and, if known, words."""
    for file in args.text:
        tokenizer = language.load_tokenizer(args.tokenizer or args.model, vocab_size)
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise unreadable(file, error) from error
        [ids] = encode(tokenizer, [text])
        yield str(file), np.array(ids), (len(text.encode()), len(text.split()))
    if args.data:
        tokens = open_tokens(args.data, args.split)
        if all((path / "tokenizer_config.json").is_file() for path in (args.model, args.data)):
            language.check_tokens_agree(args.model, args.data)
        counts = read_text_meta(args.data)["splits"][args.split]
        yield f"{args.data} {args.split}", tokens, (counts["bytes"],)
