"""The model card of an exported folder: its README.md, as the Hugging Face hub shows it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from timm.data import resolve_input_data_config
from torch import nn

from tokenformer_vit.command_line import printable
from tokenformer_vit.layers import Pattention

_LAYERS = {"query": "q, k, v", "key": "q, k, v", "value": "q, k, v", "proj": "output"}
_LICENSE = "license: apache-2.0 # of the code; check what your data allow, and correct this line"
_CITATION = """```bibtex
@inproceedings{wang2025tokenformer,
  title={TokenFormer: Rethinking Transformer Scaling with Tokenized Model Parameters},
  author={Wang, Haiyang and Fan, Yue and Naeem, Muhammad Ferjad and Xian, Yongqin and
          Lenssen, Jan Eric and Wang, Liwei and Tombari, Federico and Schiele, Bernt},
  booktitle={International Conference on Learning Representations},
  year={2025}
}
```"""


class CardFacts(NamedTuple):
    """Facts about a model for its card.

    Args:
        sections: Title of each section, with its facts by name. A fact that is None is left out,
            and so is a section without facts.
        datasets: Names of data sets on the hub.
        metrics: Names of metrics on the hub, such as ``accuracy``.
    """

    sections: Mapping[str, Mapping[str, Any]] = {}
    datasets: Sequence[str] = ()
    metrics: Sequence[str] = ()


def model_card(
    name: str,
    library: str,
    task: str,
    usage: str,
    facts: CardFacts,
    tags: Sequence[str] = ("tokenformer",),
) -> str:
    """Write a model card.

    Args:
        name: Name of the architecture, the title.
        library: Library that loads the model, ``timm`` or ``transformers``.
        task: The hub's name of the task, such as ``image-classification``.
        usage: Python code that loads the model.
        facts: Facts about the model.
        tags: Tags on the hub; with ``tokenformer`` the card cites the paper.

    Returns:
        The content of README.md: front matter in YAML, then Markdown.
    """
    front = {
        "library_name": library,
        "pipeline_tag": task,
        "tags": [task, library, *tags],
        "datasets": list(facts.datasets),
        "metrics": list(facts.metrics),
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items() if value),  # JSON is YAML
        _LICENSE,
        "---",
        "",
        f"# {printable(name)}",
    ]
    for title, entries in facts.sections.items():
        known = {key: value for key, value in entries.items() if value is not None}
        if known:
            lines += ["", f"## {printable(title)}", ""]
            lines += [f"- {printable(key)}: {printable(str(known[key]))}" for key in known]
    lines += ["", "## Use", "", "```python", usage.strip(), "```"]
    if "tokenformer" in tags:
        lines += ["", "## Citation", "", _CITATION]
    return "\n".join([*lines, ""])


def write_card(folder: Path, card: str, old: Path) -> None:
    """Write a card into a folder, but keep a README.md that somebody wrote or edited.

    Args:
        folder: Folder for ``README.md``.
        card: The content.
        old: README.md that the card would replace; it need not exist.
    """
    if old.is_file() and _LICENSE not in old.read_text(encoding="utf-8", errors="replace"):
        return  # an edited card has a license line of its own
    (folder / old.name).write_text(card, encoding="utf-8", errors="backslashreplace")


def vision_card(
    model: nn.Module,
    label_names: Sequence[str] | None,
    data_config: Mapping[str, Any] | None,
    facts: CardFacts,
) -> str:
    """Write the card of a timm model, with the facts that the model itself knows.

    Args:
        model: timm model.
        label_names: Names of the classes, in order.
        data_config: Preprocessing, in timm's words; default: from the model's configuration.
        facts: Other facts.

    Returns:
        The content of README.md.
    """
    own: Any = model
    images = resolve_input_data_config(model, dict(data_config or {}))  # as in config.json
    pairs = describe_pairs(model)
    thetas = dict.fromkeys(each.theta for each in model.modules() if isinstance(each, Pattention))
    blocks = getattr(own, "blocks", None)
    names = ", ".join(map(str, list(label_names or ())[:10]))
    about = {
        "Architecture": f"`{own.pretrained_cfg['architecture']}`",
        "Blocks": f"{len(blocks)}, of width {own.num_features}" if blocks is not None else None,
        "Key-value pairs": pairs or None,
        "Θ": ", ".join(thetas) or None,
        "Parameters": f"{sum(parameter.numel() for parameter in model.parameters()):,}",
        "Input": " × ".join(map(str, images["input_size"])) + " (channels, height, width)",
        "Preprocessing": f"resize by {images['interpolation']} interpolation, "
        f"{images['crop_mode']} crop of {images['crop_pct']:.3g}; "
        f"mean {_numbers(images['mean'])}, standard deviation {_numbers(images['std'])}",
        "Classes": f"{own.num_classes}"
        + (f" ({names}{', ...' * (own.num_classes > 10)})" if names else ""),
    }
    softmax = ".softmax(dim=-1)" if own.num_classes else ""
    register = "import tokenformer_vit  # registers the models\n" if pairs else ""
    usage = f"""
import timm
{register}from PIL import Image

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or "hf-hub:USER/NAME"
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = transform(Image.open("image.png").convert("RGB"))
{"probabilities" if own.num_classes else "features"} = model(image[None]){softmax}
"""
    return model_card(
        own.pretrained_cfg["architecture"],
        "timm",
        "image-classification" if own.num_classes else "image-feature-extraction",
        usage,
        facts._replace(sections={"Model": about, **facts.sections}),
        tags=("tokenformer",) if pairs else (),
    )


def describe_pairs(model: nn.Module) -> str:
    """Count the pairs of each kind of layer, as in ``q, k, v 96, output 96, FFN 192 to 384``.

    Returns:
        The text; empty for a model without Pattention.
    """
    counts: dict[str, list[int]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Pattention):
            kind = _LAYERS.get(name.replace(".base_layer", "").rpartition(".")[2], "FFN")  # peft's
            counts.setdefault(kind, []).append(layer.num_param_tokens)
    return ", ".join(f"{kind} {span(found)}" for kind, found in counts.items())


def span(counts: int | Sequence[int]) -> str:
    """Write one number of pairs, or the smallest and the largest, as in ``192 to 384``."""
    least, most = (counts, counts) if isinstance(counts, int) else (min(counts), max(counts))
    return f"{least}" if least == most else f"{least} to {most}"


def _numbers(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
