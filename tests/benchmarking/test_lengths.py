"""Costs of language models by their sizes alone are those that the paper publishes."""

import random
from itertools import pairwise

import pytest

from tokenformer_vit.benchmarking.costs import PARTS, total
from tokenformer_vit.benchmarking.lengths import Pairs, draw_lengths, equal_width, language_costs


@pytest.mark.parametrize(
    ("depth", "width", "pairs", "parameters"),
    [
        (12, 768, 768, 151_881_216),
        (24, 1024, 1024, 454_166_528),
        (32, 1280, 1280, 903_252_480),
        (40, 1536, 1536, 1_587_219_456),
    ],
)
def test_published_language_models(depth, width, pairs, parameters):
    costs = language_costs(depth, width, 50_304, 2048, Pairs(pairs, pairs, 4 * pairs))
    # The released models have one norm with weight and bias, which the paper's table leaves out.
    assert total(costs).parameters + 2 * width == parameters
    assert costs["qkv"].parameters == depth * 3 * 2 * width * pairs


@pytest.mark.parametrize("pairs", [None, Pairs(20, 28, 50)])
def test_totals_of_table_3(pairs):
    depth, width, tokens = 5, 24, 17
    costs = language_costs(depth, width, 101, tokens, pairs)
    size = depth * width * (12 * width if pairs is None else 2 * (3 * 20 + 28 + 50))
    blocks = {part: costs[part] for part in ("qkv", "token_token", "output", "feed_forward")}
    assert total(blocks).parameters == size
    assert total(blocks).forward_flops == 2 * size * tokens + 4 * depth * width * tokens**2
    assert costs["embedding"].parameters == total(costs).parameters - size == 101 * width
    assert costs["head"].forward_flops == 2 * 101 * width * tokens
    assert list(costs) == list(PARTS)


def test_transformer_of_equal_parameters(seed):
    assert equal_width(12, 50_304, 12 * 12 * 768**2 + 50_304 * 768) == 768
    draw = random.Random(seed)
    for _ in range(20):
        depth, vocabulary = draw.randint(1, 50), draw.randint(0, 10**5)
        parameters = draw.randint(10**6, 10**10)
        width = equal_width(depth, vocabulary, parameters)
        low, high = (12 * depth * d**2 + vocabulary * d for d in (width - 0.5, width + 0.5))
        assert low <= parameters <= high


def test_drawing_against_length(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw))
    )
    draw_lengths(tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    whole, between = (
        {line.get_label(): line.get_ydata() for line in axes.lines} for axes in figures[0].axes
    )
    ours = [name for name in between if name.startswith("TokenFormer")]
    theirs = [name for name in between if name.startswith("Transformer")]
    assert len(ours) == len(theirs) == 4
    # Token-token attention costs all TokenFormers the same, wider Transformers more.
    assert all(list(between[name]) == list(between[ours[0]]) for name in ours)
    assert list(between[theirs[0]]) == list(between[ours[0]])
    for smaller, larger in pairwise(theirs):
        assert all(between[larger] > between[smaller])
    costs = total(language_costs(12, 768, 50_304, 1024, Pairs(576, 576, 2304)))
    assert whole["TokenFormer, 124M, width 768"][0] == costs.training_flops / 1024 / 1e9
