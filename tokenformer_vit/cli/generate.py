"""Continue texts with a language model.

With a folder that has the model and its tokenizer::

    tokenformer-vit generate work_dirs/run "The parameters of a model are" --temperature 0.8

With another tokenizer, two prompts, and the most likely token each time::

    tokenformer-vit generate run "Once upon" "In the end" --tokenizer tokenizer.json --greedy

Without prompts, each line of stdin is a prompt. The text appears on stdout as it is generated. The
same --seed and prompts give the same text.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tokenformer_vit.command_line import command_parser, whole_number
from tokenformer_vit.errors import InputError

from .arguments import choose_device


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    from tokenformer_vit import language  # isort: skip  # says why, if transformers is missing
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = choose_device(args.device)
    prompts = args.prompts or _read_prompts()
    if not args.mask and (args.model / language.MASKS).is_file():
        print(
            "the model has masks, but all pairs are used; choose a mask with --mask",
            file=sys.stderr,
        )
    if not prompts:
        raise InputError("there is no prompt: give one after the model, or one a line on stdin")
    model = language.load_language_model(args.model, language.TRAINED_KINDS, args.mask).to(device)
    tokenizer = language.load_tokenizer(args.tokenizer or args.model, model.config.vocab_size)
    streamer = language.TerminalStreamer(tokenizer, skip_special_tokens=True)
    torch.manual_seed(args.seed)
    for number, prompt in enumerate(prompts):
        if number:
            print()
        language.generate_text(
            model,
            tokenizer,
            prompt,
            args.max_new_tokens,
            greedy=args.greedy,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            streamer=streamer,
        )


def _read_prompts() -> list[str]:
    try:
        return [line.rstrip("\n") for line in sys.stdin if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(
            f"stdin is not {error.encoding} text ({error.reason}); convert it, for example with "
            "iconv"
        ) from error


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder with config.json and model.safetensors")
    add("prompts", nargs="*", metavar="PROMPT", help="default: the lines of stdin")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file (default: MODEL)")
    add("--mask", metavar="NAME", help="use only the pairs of this mask")
    add("--max-new-tokens", type=whole_number(1), default=64, metavar="N", help="default: 64")
    add("--greedy", action="store_true", help="the most likely token each time")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides logits (default: 1)")
    add("--top-k", type=whole_number(1), metavar="K", help="draw from the K most likely tokens")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens of total probability P (default: 1)",
    )
    add("--seed", type=whole_number(0, 2**64 - 1), default=0, help="default: 0")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args(argv)
