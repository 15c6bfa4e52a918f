"""Measure training and inference of a TokenFormer beside the ViT of equal width and weights.

Both take turns, eager and compiled by block. × is the speed relative to the compiled ViT::

    tokenformer-vit benchmark --model-kwargs depth=2 --batch-size 4    # minutes on two CPU cores
"""

import os
from functools import partial
from itertools import product
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tokenformer_vit.benchmarking.benchmark import Run, measure
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.models.checkpoints import load_model

from .arguments import Parser, add_model, whole_number


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = Parser(prog="tokenformer-vit benchmark", description=__doc__)
    add_model(parser)
    parser.set_defaults(model="tokenformer_base_matched")
    add = parser.add_argument
    add("--against", metavar="NAME", help="compare with this timm model in place of that ViT")
    add("--amp", action="store_true", help="compute in bfloat16 by autocast")
    add("--eager", action="store_true", help="compile nothing, which needs no C++ compiler")
    add("--rounds", type=whole_number(1), default=11, metavar="N", help="default: 11")
    args = parser.parse_args(argv)
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and not args.eager:
        parser.error("TORCHDYNAMO_DISABLE=1 disables torch.compile; unset it, or give --eager")
    create: Any = partial(load_model, args.model, None, **dict(args.model_kwargs))
    other = partial(load_model, args.against, None) if args.against else None
    models = {"baseline": other or (lambda: matched_vit(create())[0]), args.model: create}
    shape = (3, args.batch_size, create().in_chans, *create().patch_embed.img_size)
    images, labels = torch.randn(shape), torch.randint(create().num_classes, shape[:2])
    batches = [*zip(images.to(args.device), labels.to(args.device), strict=True)]
    ways = ("eager",) if args.eager else ("eager", "compiled")
    computed = {
        "train": lambda model, images, labels: cross_entropy(model(images), labels),
        "infer": lambda model, images, _: model(images),
    }
    for mode, compute in computed.items():
        how = (compute, batches, mode == "train", args.amp)
        each = product(models.items(), ways)
        runs = {f"{name} {way}": Run(new, way == "compiled", *how) for (name, new), way in each}
        rows = measure(runs, args.rounds)
        del runs  # before those of the next mode are built
        against = rows[f"baseline {ways[-1]}"]["seconds"]
        print(f"{mode:40}{'images/s':>10}{'×':>8}{'peak MiB':>10}")
        for name, row in rows.items():
            speed = args.batch_size / median(row["seconds"])
            ratio = median(map(truediv, against, row["seconds"]))
            print(f"{name:40}{speed:10.2f}{ratio:8.3f}{row['peak_mib'] or '–':>10}")
