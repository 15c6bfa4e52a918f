"""Convert a ViT, GPT-2 or the authors' language models to a TokenFormer with the same outputs.

A ViT is a timm name with its pretrained weights, hf-hub:USER/NAME, an exported folder, or a
checkpoint (with --model, if it was not trained here). With some hundred images, the first pairs of
q, k, v, o are the best for such images. --to-vit converts such a TokenFormer, tuned or smaller, to
a ViT that timm loads without this package. A GPT-2 is a folder of transformers; its tokenizer goes
along. Released language models are a file, or a checkpoint of the authors' training: a file, or a
folder with one for each layer::

    tokenformer-vit convert vit_small_patch16_224 converted --images photos
    tokenformer-vit convert converted vit --to-vit
    tokenformer-vit convert gpt2 tokenformer_gpt2
    tokenformer-vit convert model.bin tokenformer_150m --tokenizer tokenizer.json
"""

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.models import TokenFormerViT, checkpoints, from_vit, to_vit
from tokenformer_vit.models.conversion import compare_outputs, noise_images
from tokenformer_vit.records import read_json
from tokenformer_vit.vision.compression import tensor_batches
from tokenformer_vit.vision.images import list_images
from tokenformer_vit.vision.prediction import load_any

from .arguments import Parser, add_model, whole_number


def main(argv: list[str]) -> None:
    """Run the command line."""
    parser = Parser(prog="tokenformer-vit convert", description=__doc__)
    add_model(parser)
    add = parser.add_argument
    add("source", metavar="IN", help="timm name, checkpoint or folder")
    add("target", type=Path, metavar="OUT", help="new folder")
    what = "to order the pairs of a ViT by, and to compare; default: noise, to compare"
    add("--images", type=Path, nargs="+", metavar="IMAGE", help=what)
    add("--to-vit", action="store_true", default=None, help="convert a TokenFormer to a ViT")
    add("--tokenizer", type=Path, metavar="PATH", help="folder or file that is saved in OUT")
    add("--num-heads", type=whole_number(1), metavar="H", help="if it has no published size")
    add("--context-length", type=whole_number(1), metavar="N", help="default: 2048")
    add("--eps", type=float, help="default: 0, as in the released code; 1e-6 to train further")
    args = parser.parse_args(argv)
    if args.target.exists():
        raise InputError(f"{args.target} already exists; choose another OUT, or remove it")
    args.path = Path(args.source.removeprefix("local-dir:")).expanduser()
    about = checkpoints.description_of(checkpoints.find_weights(args.path))
    if args.model or "architecture" in about or not args.path.exists():
        kind = "ViT"
    else:
        kind = "GPT-2" if about.get("model_type") == "gpt2" else "released model"
    convert, *known = _KINDS[kind]
    every = {option for _, *options in _KINDS.values() for option in options}
    given = [option for option in every if getattr(args, option) not in (None, [])]
    if wrong := [f"--{each.replace('_', '-')}" for each in given if each not in known]:
        what = f"{args.source} is read as a {kind}"
        raise InputError(f"{what}: correct it, or leave out {', '.join(sorted(wrong))}")
    # Without the extra [language], a ViT can be converted.
    convert(args, None if kind == "ViT" else import_module("tokenformer_vit.language"))


def _vision(args: argparse.Namespace, _: Any) -> None:
    source = load_any(args.source, args.model, **dict(args.model_kwargs)).to(args.device)
    if args.to_vit and not issubclass(kind := type(source), TokenFormerViT):
        raise InputError(f"{args.source} is a {kind.__name__}: leave out --to-vit")
    paths = list_images(args.images or ())
    read = partial(tensor_batches, source, paths, args.batch_size, args.device)
    made: Any = to_vit(source) if args.to_vit else from_vit(source, read())
    noise = noise_images(source, 32).split(args.batch_size)
    which = (read(), "images") if paths else (noise, "images of noise")
    facts = {"Model": source.pretrained_cfg["architecture"], "Weights": Path(args.source).name}
    facts["Outputs"] = compare_outputs(made, source, *which)
    try:
        checkpoints.save_model(made.cpu(), args.target, facts={"Converted from": facts})
    except InputError:
        raise
    except ValueError as error:  # JSON has no classes
        how = "its stem or the eps of its norms has no name: use models.to_vit in Python"
        raise InputError(f"timm cannot save this ViT, because {how}") from error
    print(f"Done. In {args.target}: model.safetensors, config.json and README.md")


def _from_gpt2(args: argparse.Namespace, language: Any) -> None:
    classes = read_json(args.path / checkpoints.CONFIG).get("architectures") or ["GPT2LMHeadModel"]
    if classes[0] not in ("GPT2LMHeadModel", "GPT2Model"):
        raise InputError(f"{args.source} is a {classes[0]}: give a GPT2LMHeadModel")
    source = language.load_language_model(args.path).float()  # half precision would lose digits
    model = language.from_gpt2(source)
    shape, random = (2, min(64, model.config.context_length)), torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, shape, generator=random)
    compare_outputs(model, source, [tokens], "random tokens")
    files = ("tokenizer.json", "tokenizer_config.json", "merges.txt")
    own = args.path if any((args.path / name).is_file() for name in files) else None
    _save(language, model, args.target, args.tokenizer or own)


def _from_released(args: argparse.Namespace, language: Any) -> None:
    names = ("num_heads", "context_length", "eps")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    model = language.released.load_released(args.path, **given)
    print(f"{model.num_parameters():,} parameters, {model.config.num_heads} heads")
    _save(language, model, args.target, args.tokenizer)


def _save(language: Any, model: Any, target: Path, place: Path | None) -> None:
    tokenizer = language.load_tokenizer(place, model.config.vocab_size) if place else None
    language.save_language_model(model, target, tokenizer)
    print(f"Done. In {target}, {'with' if tokenizer else 'without'} a tokenizer (--tokenizer)")


# How each kind of IN is converted, and the options that it takes.
_KINDS = {
    "ViT": (_vision, "images", "to_vit", "model", "model_kwargs"),
    "GPT-2": (_from_gpt2, "tokenizer"),
    "released model": (_from_released, "tokenizer", "num_heads", "context_length", "eps"),
}
