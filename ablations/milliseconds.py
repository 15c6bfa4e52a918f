"""How many milliseconds does an image take at each size? Forward passes, compiled, in turns.

NAME=MODEL is a variant and what `tokenformer-vit compress` takes as MODEL, or "vit" for the matched
ViT of the first one; MODEL@SIZE is a size of it, extracted, or with --set-size as `set_size` sets
it. Linear tokens are fused. Rows are added to results.csv of the work directory; nothing else
should run::

    python ablations/milliseconds.py any_size_ms whole=work_dirs/whole refit_0.5=smaller/flops_0.5
"""

from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import results
import torch
from timm.utils import reparameterize_model

from tokenformer_vit.benchmarking.benchmark import Run, measure, short
from tokenformer_vit.benchmarking.matched import matched_vit
from tokenformer_vit.cli import run
from tokenformer_vit.cli.arguments import Parser, whole_number
from tokenformer_vit.growth import extract
from tokenformer_vit.records import environment
from tokenformer_vit.vision.prediction import load_any


def build(source: str, first: str, set_size: bool) -> Any:
    """Return the model of a word."""
    if source == "vit":
        return matched_vit(load_any(first.partition("@")[0]))[0]
    path, _, size = source.partition("@")
    model = load_any(path)
    if size and set_size:
        model.set_size(float(size))
    elif size:
        model = extract(model, float(size))
    return reparameterize_model(model)


def main(words: list[str]) -> None:
    """Run the command line."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("sweep", help="of the rows; the batch size is added to it")
    add("models", nargs="+", metavar="NAME=MODEL", help="the first is what others are divided by")
    add("--set-size", action="store_true", help="set sizes, in place of extracting them")
    add("--batch-sizes", nargs="+", type=whole_number(1), default=[1, 32], help="default: 1 32")
    add("--rounds", type=whole_number(1), default=21, help="default: 21")
    add("--work-dir", type=Path, default=Path("work_dirs/milliseconds"))
    args = parser.parse_args(words)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sources = dict(word.split("=", 1) for word in args.models)
    first = next(iter(sources.values()))
    models = {name: partial(build, own, first, args.set_size) for name, own in sources.items()}
    model = next(iter(models.values()))()
    side = model.patch_embed.img_size
    machine = environment(device)
    about: dict[str, Any] = {key: machine[key] for key in ("date", "commit", "hardware")}
    base = f"{model.pretrained_cfg['architecture']} {side[0]} px"
    about |= {"torch": torch.__version__, "question": "milliseconds", "base": base}
    about |= {"dtype": "float32", "title": str(__doc__).splitlines()[0], "seed": 0, "lr": 0.0}
    for size in args.batch_sizes:
        images = torch.randn(size, 3, *side, device=device)
        how: Any = (lambda model, images: model(images), [(images,)], False, False)
        rows = measure({name: Run(new, True, *how) for name, new in models.items()}, args.rounds)
        whole = next(iter(rows.values()))["seconds"]
        found = []
        for name, row in rows.items():
            own = {"sweep": f"{args.sweep}_{size}", "variant": name, "label": name}
            own |= {"milliseconds": short(1000 * median(row["seconds"]) / size), "batch_size": size}
            own["time_ratio"] = short(median(map(truediv, row["seconds"], whole)))
            print("{sweep}: {variant}: {milliseconds:.4g} ms, × {time_ratio:.3f}".format(**own))
            found.append({**about, **own})
        results.append(found, args.work_dir / "results.csv")


if __name__ == "__main__":
    run(main)
