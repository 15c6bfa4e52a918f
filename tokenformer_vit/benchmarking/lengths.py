"""What language models cost by their sizes alone, and how costs grow with the sequence.

The counting is that of :mod:`~tokenformer_vit.benchmarking.costs`.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from tokenformer_vit.files import write_whole

from .costs import PARTS, Cost, attention_flops, model_costs, product_flops, total

__all__ = ["Pairs", "draw_lengths", "equal_width", "language_costs"]


class Pairs(NamedTuple):
    """How many pairs each Pattention of a block has."""

    qkv: int
    proj: int
    ffn: int


# The paper's language models that grow at a fixed width, from 124M to what it calls 1.4B.
GROWN_DEPTH, GROWN_WIDTH, GROWN_VOCABULARY = 12, 768, 50_304
GROWN_PAIRS = tuple(Pairs(n, n, 4 * n) for n in (576, 2140, 4850, 8620))


def language_costs(
    depth: int, width: int, vocabulary: int, num_tokens: int, pairs: Pairs | None = None
) -> dict[str, Cost]:
    """Count the parameters and the forward FLOPs of every part of a language model, from its sizes.

    Args:
        depth: Number of blocks.
        width: Width d of the tokens.
        vocabulary: Entries of the embedding, which the head shares.
        num_tokens: Length T of the sequence.
        pairs: Those of a TokenFormer; None for a Transformer, whose feed-forward part is 4·d wide.

    Returns:
        A cost for each of ``PARTS``, for one sequence. Every token attends to every other, as in
        the paper: what a causal kernel saves is not taken off. The head is counted for all tokens,
        where the paper prints it for one.

    Source:
        TokenFormer, arXiv:2410.23168, Table 3.
    """
    if pairs is None:
        sizes = {"qkv": 3 * width**2, "output": width**2, "feed_forward": 8 * width**2}
    else:
        numbers = {"qkv": 3 * pairs.qkv, "output": pairs.proj, "feed_forward": pairs.ffn}
        sizes = {part: 2 * width * number for part, number in numbers.items()}
    costs = {
        part: Cost(depth * size, product_flops(depth * size, num_tokens))
        for part, size in sizes.items()
    }
    costs["embedding"] = Cost(vocabulary * width)
    costs["token_token"] = Cost(0, attention_flops(depth * width, num_tokens))
    costs["head"] = Cost(0, product_flops(vocabulary * width, num_tokens))
    return {part: costs.get(part, Cost()) for part in PARTS}


def equal_width(depth: int, vocabulary: int, parameters: int) -> int:
    """Find the width at which a Transformer of :func:`language_costs` has so many parameters.

    Args:
        depth: Number of blocks.
        vocabulary: Entries of the embedding.
        parameters: How many, with the embedding.

    Returns:
        The nearest whole number to the solution d of 12·depth·d² + vocabulary·d = parameters.
    """
    square = 12 * depth
    root = math.sqrt(vocabulary**2 + 4 * square * parameters)
    return round((root - vocabulary) / (2 * square))


def draw_lengths(
    path: Path,
    models: Mapping[str, nn.Module] | None = None,
    lengths: Sequence[int] = range(1024, 32 * 1024 + 1, 1024),
) -> None:
    """Draw what a token costs against the length of its sequence into a PNG file.

    Args:
        path: The file.
        models: What to draw, by name: models of
            :func:`~tokenformer_vit.benchmarking.costs.model_costs`. None for the paper's
            figure: TokenFormers that grow by pairs, at one width, stand against Transformers of the
            same depth and as many parameters, which grow by width.
        lengths: Numbers of tokens.

    Raises:
        ImportError: If matplotlib is not installed.
        InputError: If the costs of a model are not known.
        OSError: If the file cannot be written; ``filename`` is ``path``.

    Source:
        TokenFormer, arXiv:2410.23168, Figure 5; the sizes are those of its growing language models.
    """
    from matplotlib.figure import Figure  # what counts does without it

    curves = _growing() if models is None else _asked(models)
    figure = Figure(figsize=(11, 4), layout="constrained")
    whole, between = figure.subplots(1, 2)
    for label, line, color, costs_of in curves:
        flops = {whole: [], between: []}
        for length in lengths:
            costs = costs_of(length)
            flops[whole].append(total(costs).training_flops / length / 1e9)
            flops[between].append(costs["token_token"].training_flops / length / 1e9)
        for axes, values in flops.items():
            axes.plot(lengths, values, line, color=color, label=label)
    whole.set(title="training GFLOPs a token", xlabel="tokens in a sequence", ylim=0)
    between.set(title="of these, token-token attention", xlabel="tokens in a sequence", ylim=0)
    between.legend(loc="upper left", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())


# Label, line style, colour, and the costs at a number of tokens.
_Curve = tuple[str, str, str, Callable[[int], dict[str, Cost]]]


def _growing() -> Iterator[_Curve]:
    """List the curves of the paper's figure."""
    for index, pairs in enumerate(GROWN_PAIRS):
        grown = language_costs(GROWN_DEPTH, GROWN_WIDTH, GROWN_VOCABULARY, 1, pairs)
        parameters = total(grown).parameters
        wider = equal_width(GROWN_DEPTH, GROWN_VOCABULARY, parameters)
        for kind, line, width, own in (
            ("TokenFormer", "-", GROWN_WIDTH, pairs),
            ("Transformer", "--", wider, None),
        ):
            label = f"{kind}, {parameters / 1e6:,.0f}M, width {width}"
            costs_of = partial(language_costs, GROWN_DEPTH, width, GROWN_VOCABULARY, pairs=own)
            yield label, line, f"C{index}", costs_of


def _asked(models: Mapping[str, nn.Module]) -> Iterator[_Curve]:
    """List the curves of models, each with its number of parameters."""
    for index, (name, model) in enumerate(models.items()):
        parameters = total(model_costs(model)).parameters
        label = f"{name}, {parameters / 1e6:,.1f}M"
        yield label, ("-", "--")[index % 2], f"C{index}", partial(model_costs, model)
