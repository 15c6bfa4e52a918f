"""Convert the authors' language checkpoints to folders for transformers, and back.

From a file of the released 150M, 450M, 900M or 1.5B model, or from a checkpoint of the authors'
training, a file or a folder with one for each layer::

    tokenformer-vit convert model.bin tokenformer_150m --tokenizer tokenizer.json

generate, evaluate-lm, and, after `import tokenformer_vit.language`, AutoModelForCausalLM read the
folder. From a folder to a file of the released code::

    tokenformer-vit convert tokenformer_150m model.bin --to-released

From a folder with a GPT-2 of transformers, to a TokenFormer with the same logits::

    tokenformer-vit convert gpt2 tokenformer_gpt2

The folder's tokenizer and generation configuration go along. OUT appears only when it is complete.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokenformer_vit.command_line import command_parser, printable, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    if args.to_released:
        _to_released(args)
    elif _is_gpt2(args.source):
        _from_gpt2(args)
    else:
        _from_released(args)


def _from_released(args: argparse.Namespace) -> None:
    from tokenformer_vit import language

    tensors = language.read_released(args.source)
    config, state_dict = language.from_released(tensors, **_of_released(args))
    tokenizer = args.tokenizer and language.load_tokenizer(args.tokenizer, config.vocab_size)
    with torch.device("meta"):
        model = language.TokenFormerForCausalLM(language.TokenFormerConfig(**vars(config)))
    model.model.load_state_dict(state_dict, assign=True)
    model.tie_weights()
    language.save_language_model(model, args.target, tokenizer or None)
    print(
        f"{config.depth} blocks, width {config.embed_dim}, {config.num_heads} heads, "
        f"{config.num_qkv_param_tokens} / {config.num_ffn_param_tokens} pairs: "
        f"{model.num_parameters():,} parameters of {str(model.dtype).removeprefix('torch.')}\n"
        f"Done. In {printable(str(args.target))}: a model for transformers{_with(tokenizer)}"
    )


def _is_gpt2(source: Path) -> bool:
    from transformers import PretrainedConfig

    if not (source / "config.json").is_file():
        return False
    config, _ = PretrainedConfig.get_config_dict(source, local_files_only=True)
    return config.get("model_type") == "gpt2"


def _from_gpt2(args: argparse.Namespace) -> None:
    from tokenformer_vit import language

    if _of_released(args):
        raise InputError(
            f"{args.source} says its heads and context, and its layers have no eps: leave out "
            "--num-heads, --context-length and --eps"
        )
    source = language.load_language_model(args.source).float()  # half precision would lose digits
    files = ("tokenizer.json", "tokenizer_config.json", "merges.txt")
    own = args.source if any((args.source / name).is_file() for name in files) else None
    place, tokenizer = args.tokenizer or own, None
    if place:
        tokenizer = language.load_tokenizer(place, source.config.vocab_size)
    model = language.from_gpt2(source)
    shape = 2, min(64, model.config.context_length)
    tokens = torch.randint(
        model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        logits = torch.stack([each(tokens).logits.double() for each in (model, source)])
    ours, theirs = logits - logits.mean(dim=-1, keepdim=True)  # a common offset changes nothing
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    language.save_language_model(model, args.target, tokenizer)
    print(
        f"{model.num_parameters():,} parameters, {source.num_parameters():,} in GPT-2, in float32\n"
        f"Relative error of the logits for {errors.numel()} random tokens: at most "
        f"{errors.max().item():.1e}, mean {errors.mean().item():.1e}\n"
        f"Done. In {printable(str(args.target))}: a model for transformers{_with(tokenizer)}"
    )


def _with(tokenizer: Any) -> str:
    return " and its tokenizer" if tokenizer else "; no tokenizer (--tokenizer)"


def _to_released(args: argparse.Namespace) -> None:
    from tokenformer_vit import language

    state_dict = language.to_released(language.load_language_model(args.source))
    args.target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(args.target) as file:
        torch.save({name: tensor.detach() for name, tensor in state_dict.items()}, file)
    target = printable(str(args.target))
    print(f"Done. In {target}: {len(state_dict)} tensors under the released names")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="IN", help="checkpoint of the authors, or folder")
    add("target", type=Path, metavar="OUT", help="folder, or released file")
    add("--to-released", action="store_true", help="from a folder to a file")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file that is saved in OUT")
    add(
        "--num-heads",
        type=whole_number(1),
        metavar="H",
        help="attention heads, needed if the model has no published size",
    )
    add("--context-length", type=whole_number(1), metavar="N", help="default: 2048")
    add(
        "--eps",
        type=float,
        help="eps of Pattention (default: 0, as in the released code; use 1e-6 to train further)",
    )
    args = parser.parse_args(argv)
    if args.to_released and (args.tokenizer is not None or _of_released(args)):
        parser.error(
            "--to-released keeps what the folder says: leave out --tokenizer, --num-heads, "
            "--context-length and --eps"
        )
    return args


def _of_released(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of the options that a released file does not answer."""
    names = ("num_heads", "context_length", "eps")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
