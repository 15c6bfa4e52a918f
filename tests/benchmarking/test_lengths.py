"""The costs computed from sizes equal the published ones, and the figure shows them."""

import random
from itertools import pairwise

import pytest

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.benchmarking.lengths import draw_lengths, equal_width, transformer_of_width
from tokenformer_vit.models import LMConfig, TokenFormerLM, lm_config

SIZES = {"depth": 5, "embed_dim": 24, "num_heads": 3, "vocab_size": 101, "rotary_share": 0.5}
PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("150m", 151_881_216), ("450m", 454_166_528), ("900m", 903_252_480), ("1.5b", 1_587_219_456)],
)
def test_published_language_models(preset, parameters):
    config = lm_config(preset)
    costs = model_costs(TokenFormerLM(config, device="meta"))
    assert total(costs).parameters == parameters
    # The released models have one norm with weight and bias, which the paper's table leaves out.
    assert costs["other"].parameters == 2 * config.embed_dim
    assert costs["qkv"].parameters == config.depth * 3 * 2 * config.embed_dim**2


@pytest.mark.parametrize("width", [24, 25])
@pytest.mark.parametrize("transformer", [False, True])
def test_totals_of_table_3(transformer, width):
    if transformer:
        model, size = transformer_of_width(LMConfig(**SIZES), width), 5 * 12 * width**2
        weights = {"qkv": 3 * width**2, "output": width**2, "feed_forward": 8 * width**2}
    else:
        width = 24
        model = TokenFormerLM(LMConfig(**SIZES, **PAIRS), device="meta")
        size = 5 * 2 * width * (3 * 20 + 28 + 50)
        weights = {"qkv": 6 * 20 * width, "output": 2 * 28 * width, "feed_forward": 100 * width}
    costs = model_costs(model, 17)
    if not transformer:
        assert {part: costs[part].parameters for part in weights} == {
            part: 5 * weight for part, weight in weights.items()
        }
    blocks = {part: costs[part] for part in (*weights, "token_token")}
    assert total(blocks).parameters == size
    assert total(blocks).forward_flops == 2 * size * 17 + 4 * 5 * width * 17**2
    assert costs["embedding"].parameters == (101 + transformer) * width  # one row of positions
    assert costs["head"].forward_flops == 2 * 101 * width * 17


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
    costs = total(model_costs(TokenFormerLM(lm_config("grown_124m"), device="meta"), 1024))
    assert whole["TokenFormer, 124M, width 768"][0] == costs.training_flops / 1024 / 1e9
