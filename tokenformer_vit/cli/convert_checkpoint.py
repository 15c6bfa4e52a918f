"""Convert a ViT, a GPT-2 or the authors' language models to a TokenFormer with the same outputs.

A ViT: a timm name with its pretrained weights, hf-hub:USER/NAME, an exported folder, or a
checkpoint of this trainer (with --model of any other)::

    tokenformer-vit convert vit_small_patch16_224 converted --images photos

Both models are compared on the images, or on noise. The folder is read by timm and the other
commands. Images that cannot be read end the command.

A language model of the authors: a file of the released 150M, 450M, 900M or 1.5B model, or a
checkpoint of their training, a file or a folder with one for each layer::

    tokenformer-vit convert model.bin tokenformer_150m --tokenizer tokenizer.json

generate, evaluate-lm, and, after `import tokenformer_vit.language`, AutoModelForCausalLM read the
folder. From a folder to a file of the released code::

    tokenformer-vit convert tokenformer_150m model.bin --to-released

A folder with a GPT-2 of transformers; its tokenizer and generation configuration go along::

    tokenformer-vit convert gpt2 tokenformer_gpt2

OUT appears only when it is complete.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import whole_file
from tokenformer_vit.models.checkpoints import CONFIG, description_of, read_checkpoint

from .arguments import Parser, add_model, whole_number
from .convert_vit import convert_vit, local_path

# What can be given for one kind of model only.
_LANGUAGE = ("tokenizer", "num_heads", "context_length", "eps")
_VISION = ("images", "model", "model_kwargs", "num_classes")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = _parse(argv)
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    if args.to_released:
        _refuse(args, _VISION, "a language model")
        _to_released(args)
        return
    kind = "vit" if args.model else source_kind(args.source)
    if kind == "vit":
        _refuse(args, _LANGUAGE, "a ViT")
        convert_vit(args)
        return
    _refuse(args, _VISION, "a language model")
    (_from_gpt2 if kind == "gpt2" else _from_released)(args)


def source_kind(source: str) -> str:
    """Tell what IN is: ``vit``, ``gpt2``, or ``released`` for the authors' language models.

    Raises:
        InputError: If it is something else.
    """
    path = local_path(source)
    found = "it is neither a file, a folder, nor a name of timm"
    if path.is_dir():
        config = path / CONFIG
        about = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        if any(path.glob("layer_*-model_*-model_states.pt")):
            return "released"
        if "architecture" in about:
            return "vit"
        kind = about.get("model_type")
        if kind == "gpt2":
            return kind
        found = f"it is a model of type {kind}" if kind else f"no {CONFIG} in it names a timm model"
    elif path.is_file():
        content = {} if "architecture" in description_of(path) else _outline(path)
        if "architecture" in description_of(path, content):
            return "vit"
        if any(str(name).startswith("sequential.") for name in content.get("module", content)):
            return "released"
        found = "it does not name its model: if it is a ViT, give its name with --model"
    elif source.startswith("hf-hub:") or timm.is_model(source):
        return "vit"
    raise InputError(f"{source} cannot be converted: {found}")


def _outline(path: Path) -> dict[str, Any]:
    """Return the content of a file without the numbers of its tensors."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return dict.fromkeys(file.keys())
    return read_checkpoint(path, "meta")


def _refuse(args: argparse.Namespace, names: Sequence[str], kind: str) -> None:
    if given := [name for name in names if getattr(args, name) not in (None, {})]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(f"{args.source} is {kind}: leave out {options}")


def _from_released(args: argparse.Namespace) -> None:
    language = _language()
    tensors = language.read_released(Path(args.source))
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
        f"Done. In {args.target}: a model for transformers{_with(tokenizer)}"
    )


def _from_gpt2(args: argparse.Namespace) -> None:
    language = _language()
    folder = local_path(args.source)
    if _of_released(args):
        raise InputError(
            f"{args.source} says its heads and context, and its layers have no eps: leave out "
            "--num-heads, --context-length and --eps"
        )
    classes = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("architectures")
    if classes not in (None, ["GPT2LMHeadModel"], ["GPT2Model"]):
        raise InputError(f"{args.source} is a {classes[0]}: give a GPT2LMHeadModel")
    source = language.load_language_model(folder).float()  # half precision would lose digits
    files = ("tokenizer.json", "tokenizer_config.json", "merges.txt")
    own = folder if any((folder / name).is_file() for name in files) else None
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
    if not errors.isfinite().all():
        raise InputError("the logits are not finite: give weights of a training that converged")
    language.save_language_model(model, args.target, tokenizer)
    print(
        f"{model.num_parameters():,} parameters, {source.num_parameters():,} in GPT-2, in float32\n"
        f"Relative error of the logits for {errors.numel()} random tokens: at most "
        f"{errors.max().item():.1e}, mean {errors.mean().item():.1e}\n"
        f"Done. In {args.target}: a model for transformers{_with(tokenizer)}"
    )


def _with(tokenizer: Any) -> str:
    return " and its tokenizer" if tokenizer else "; no tokenizer (--tokenizer)"


def _to_released(args: argparse.Namespace) -> None:
    language = _language()
    state_dict = language.to_released(language.load_language_model(Path(args.source)))
    args.target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(args.target) as file:
        torch.save({name: tensor.detach() for name, tensor in state_dict.items()}, file)
    target = str(args.target)
    print(f"Done. In {target}: {len(state_dict)} tensors under the released names")


def _language() -> Any:
    from transformers.utils import logging

    from tokenformer_vit import language

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return language


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="tokenformer-vit convert", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("source", metavar="IN", help="timm name, checkpoint or folder")
    add("target", type=Path, metavar="OUT", help="folder, or released file")
    what = "folder of images, or one image, on which a ViT is compared; default: noise"
    add("--images", type=Path, metavar="FOLDER", help=what)
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
    return {name: getattr(args, name) for name in _LANGUAGE[1:] if getattr(args, name) is not None}
