"""Plot the cost of a token against the length of its sequence."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from tokenformer_vit.files import write_figure
from tokenformer_vit.models import LMConfig, TokenFormerLM, lm_config

from .costs import model_costs, total

# The paper's language models that grow at a fixed width, from 124M to "1.4B" parameters.
_GROWN = ("grown_124m", "grown_354m", "grown_757m", "grown_1.4b")


def equal_width(depth: int, vocabulary: int, parameters: int) -> int:
    """Compute the width of a Transformer with a given number of parameters.

    Args:
        depth: Number of blocks.
        vocabulary: Entries of the embedding, which is also the head.
        parameters: Number of parameters, with the embedding; without norms, biases and positions.

    Returns:
        The whole number nearest to the solution d of 12·depth·d² + vocabulary·d = parameters.
    """
    square = 12 * depth
    root = math.sqrt(vocabulary**2 + 4 * square * parameters)
    return round((root - vocabulary) / (2 * square))


def draw_lengths(
    path: Path,
    models: Mapping[str, nn.Module] | None = None,
    lengths: Sequence[int] = range(1024, 32 * 1024 + 1, 1024),
) -> None:
    """Plot training FLOPs per token against sequence length.

    Args:
        path: PNG file to write.
        models: Models by name, of any kind that
            :func:`~tokenformer_vit.benchmarking.costs.model_costs` supports. None draws the paper's
            figure: TokenFormers of one width that grow by pairs, and Transformers of the same depth
            and number of parameters, which grow by width.
        lengths: Numbers of tokens.

    Raises:
        ImportError: If matplotlib is not installed.
        InputError: If the costs of a model are unknown.
        OSError: If the file cannot be written; ``filename`` is ``path``.

    Source:
        TokenFormer, arXiv:2410.23168, Figure 5, with the sizes of its growing language models.
    """
    from matplotlib.figure import Figure  # only charts need it

    curves = _paper() if models is None else _given(models)
    figure = Figure(figsize=(11, 4), layout="constrained")
    whole, between = figure.subplots(1, 2)
    for label, line, color, model in curves:
        flops = {whole: [], between: []}
        for length in lengths:
            costs = model_costs(model, length)
            flops[whole].append(total(costs).training_flops / length / 1e9)
            flops[between].append(costs["token_token"].training_flops / length / 1e9)
        for axes, values in flops.items():
            axes.plot(lengths, values, line, color=color, label=label)
    whole.set(title="training GFLOPs per token", xlabel="tokens in a sequence", ylim=0)
    between.set(title="of these, token-token attention", xlabel="tokens in a sequence", ylim=0)
    between.legend(loc="upper left", fontsize="small")
    write_figure(path, figure, dpi=120)


# Label, line style, colour, and model.
_Curve = tuple[str, str, str, nn.Module]


def _paper() -> Iterator[_Curve]:
    """List the curves of the paper's figure."""
    for index, name in enumerate(_GROWN):
        config = lm_config(name)
        model = TokenFormerLM(config, device="meta")
        parameters = total(model_costs(model)).parameters
        wider = equal_width(config.depth, config.vocab_size, parameters)
        for kind, line, width, curve in (
            ("TokenFormer", "-", config.embed_dim, model),
            ("Transformer", "--", wider, transformer_of_width(config, wider)),
        ):
            label = f"{kind}, {parameters / 1e6:,.0f}M, width {width}"
            yield label, line, f"C{index}", curve


def transformer_of_width(config: LMConfig, width: int) -> TokenFormerLM:
    """Build a model with the costs of a Transformer, on the device ``meta``.

    It is a TokenFormer with 2·C pairs for attention and 4·C pairs for the feed-forward part, and
    each pair has 2·C weights: as many as the 4·C² and 8·C² weights of a Transformer.

    Args:
        config: Depth and vocabulary.
        width: Width C.
    """
    own = replace(
        config,
        embed_dim=width,
        num_heads=1,
        num_qkv_param_tokens=width // 2,
        num_proj_param_tokens=2 * width - 3 * (width // 2),
        num_ffn_param_tokens=4 * width,
        positions="learned",
        context_length=1,
    )
    return TokenFormerLM(own, device="meta")


def _given(models: Mapping[str, nn.Module]) -> Iterator[_Curve]:
    """List the curves of models, each with its number of parameters."""
    for index, (name, model) in enumerate(models.items()):
        parameters = total(model_costs(model)).parameters
        yield f"{name}, {parameters / 1e6:,.1f}M", ("-", "--")[index % 2], f"C{index}", model
