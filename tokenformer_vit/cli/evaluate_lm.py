"""Evaluate a language model: perplexity of texts.

Of text files, or of a folder of tokens that prepare-text made::

    tokenformer-vit evaluate-lm work_dirs/run --text valid.txt test.txt
    tokenformer-vit evaluate-lm work_dirs/run --data data/tinyshakespeare --split val --stride 512

MODEL is a folder with config.json, model.safetensors and the tokenizer: a TokenFormer, or any other
causal language model of transformers. All weights are converted to float32. For tasks such as
lambada and hellaswag, see `tokenformer-vit lm-eval`.

The table is printed; --out gets a record of the run, JSON with what every record has (command,
commit, date, hardware, versions), and::

    model, parameters          folder; number of parameters
    dtype                      float32, or "autocast bfloat16"
    n                          number of texts
    settings                   mask, context, stride, batch_size, device
    texts                      {name: tokens, bytes, words, loss in nats a token, perplexity,
                               bits_per_byte, word_perplexity}; null if not known
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenformer_vit.errors import InputError
from tokenformer_vit.records import environment, write_record

from .arguments import Parser, device, whole_number

_COLUMNS = ("tokens", "loss", "perplexity", "bits_per_byte", "word_perplexity")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    from transformers.utils import logging

    from tokenformer_vit import language

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = language.load_language_model(args.model, args.mask).float().to(args.device)
    most = getattr(model.config, "max_position_embeddings", None)
    context = args.context or most or 1024
    if most and context > most:
        raise InputError(f"--context {context} is more than the model's context of {most} tokens")
    stride = args.stride or context
    if stride > context:
        raise InputError(f"--stride must be at most {context}, the context, but got {stride}")
    texts = _measure(args, model, context, stride)
    print("\t".join(("text", *_COLUMNS)))
    for name, values in texts.items():
        cells = (values[column] for column in _COLUMNS)
        print(name, *("–" if cell is None else f"{cell:.5g}" for cell in cells), sep="\t")
    out = args.out or args.model / "evaluation.json"
    settings = {"mask": args.mask, "context": context, "stride": stride}
    settings |= {"batch_size": args.batch_size, "device": args.device.type}
    write_record(
        out,
        {
            **environment(args.device.type),
            "model": str(args.model),
            "parameters": model.num_parameters(),
            "dtype": "autocast bfloat16" if args.amp else "float32",
            "n": len(texts),
            "settings": settings,
            "texts": texts,
        },
    )
    print(f"Done. In {out}: a record")


def _measure(args: argparse.Namespace, model: Any, context: int, stride: int) -> dict[str, Any]:
    """Measure all texts, by name."""
    from tokenformer_vit import language
    from tokenformer_vit.language.data import open_tokens, read_text_meta
    from tokenformer_vit.language.evaluation import measure_text, text_values

    how = {"batch_size": args.batch_size, "amp": args.amp}
    found = {}
    for file in args.text:
        tokenizer = language.load_tokenizer(args.tokenizer or args.model, model.config.vocab_size)
        text = file.read_text(encoding="utf-8-sig")
        ids: Any = tokenizer(text, verbose=False)["input_ids"]
        measured = measure_text(model, np.array(ids), context, stride, title=str(file), **how)
        found[str(file)] = text_values(*measured, len(text.encode()), len(text.split()))
    if args.data:
        if all((path / "tokenizer_config.json").is_file() for path in (args.model, args.data)):
            language.check_tokens_agree(args.model, args.data)
        name = f"{args.data} {args.split}"
        tokens = open_tokens(args.data, args.split)
        measured = measure_text(model, tokens, context, stride, title=name, **how)
        counts = read_text_meta(args.data)["splits"][args.split]
        found[name] = text_values(*measured, counts["bytes"])
    return found


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokenformer-vit evaluate-lm", description=__doc__)
    add, positive = parser.add_argument, whole_number(1)
    add("model", type=Path, metavar="MODEL", help="folder with config.json and model.safetensors")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file (default: MODEL)")
    add("--mask", metavar="NAME", help="use only the pairs of this mask")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="UTF-8 text files")
    add("--data", type=Path, metavar="FOLDER", help="folder of tokens that prepare-text made")
    add("--split", default="val", help="split of --data (default: %(default)s)")
    add("--context", type=positive, metavar="N", help="tokens read at once (default: the model's)")
    add(
        "--stride",
        type=positive,
        metavar="N",
        help="tokens from one window to the next (default: the context). A smaller stride makes "
        "windows overlap: slower, and a lower perplexity",
    )
    add("--batch-size", type=positive, default=8, metavar="B", help="default: %(default)s")
    add("--amp", action="store_true", help="bfloat16 by autocast; losses stay float32")
    add("--device", type=device, default="auto", help="default: cuda if it is there, else cpu")
    add("--out", type=Path, metavar="FILE", help="default: evaluation.json in MODEL")
    args = parser.parse_args(argv)
    if not (args.text or args.data):
        raise InputError("there is nothing to evaluate: give --text or --data")
    if missing := [file for file in args.text if not file.is_file()]:
        raise InputError(f"there is no file {missing[0]}; give existing files with --text")
    return args
