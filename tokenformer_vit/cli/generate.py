"""Continue texts with a language model, a folder that has the model and its tokenizer.

    tokenformer-vit generate work_dirs/run "The parameters of a model are" --temperature 0.8
    tokenformer-vit generate run "Once upon" "In the end" --tokenizer tokenizer.json --greedy

Without prompts, each line of stdin is a prompt. The text appears on stdout as it is generated.
"""

import sys
from pathlib import Path

import torch
from transformers import TextStreamer

from tokenformer_vit import language
from tokenformer_vit.errors import InputError

from .arguments import Parser, device, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit generate", description=__doc__)
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder with config.json and model.safetensors")
    add("prompts", nargs="*", metavar="PROMPT", help="default: the lines of stdin")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file; default: MODEL")
    add("--max-new-tokens", type=whole_number(1), default=64, metavar="N", help="default: 64")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides logits; default: 1")
    add("--greedy", action="store_const", dest="temperature", const=0, help="as --temperature 0")
    add("--top-k", type=whole_number(0), default=0, metavar="K", help="draw from K tokens only")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from total probability P only")
    add("--seed", type=whole_number(0), default=0, help="default: 0")
    add("--device", type=device, default="auto", help="default: cuda if it is there, else cpu")
    args = parser.parse_args(argv)
    if not (args.temperature >= 0 and 0 < args.top_p <= 1):
        parser.error("--temperature must be at least 0, and --top-p above 0 and at most 1")
    prompts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not all(prompts) or not prompts:
        raise InputError("a prompt is empty: give a text after the model, or one a line on stdin")
    model = language.load_language_model(args.model).to(args.device)
    tokenizer = language.load_tokenizer(args.tokenizer or args.model, model.config.vocab_size)
    drawn = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    how = {"do_sample": True, **drawn} if args.temperature else {"do_sample": False}
    how |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)  # type: ignore[arg-type]
    torch.manual_seed(args.seed)
    for number, prompt in enumerate(prompts):
        print("\n" * bool(number), end="")
        tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(args.device)
        model.generate(**tokens, **how, streamer=streamer, max_new_tokens=args.max_new_tokens)
