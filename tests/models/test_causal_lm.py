"""The language model against its definition: counts, causality, positions, cache, padding."""

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow, nest
from tokenformer_vit.models import LM_PRESETS, KVCache, LMConfig, TokenFormerLM, lm_config
from tokenformer_vit.ops import THETAS

PARAMETERS = {
    "150m": 151_881_216,
    "450m": 454_166_528,
    "900m": 903_252_480,
    "1.5b": 1_587_219_456,
    "grown_124m": 123_569_664,
    "grown_354m": 354_190_848,
    "released_354m": 353_503_232,
    "released_757m": 756_156_416,
}
KINDS = {
    "rotary": {},
    "learned": {"positions": "learned", "norm": "rms"},
    "untied": {"tie_embeddings": False, "rotary_share": 1.0},
}


def build(**changes):
    config = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = TokenFormerLM(LMConfig(**{**config, "rotary_share": 0.5, **changes})).double().eval()
    model.embedding.weight.data.mul_(20)  # so that the token at hand is not drowned
    return model


@pytest.mark.parametrize("preset", LM_PRESETS)
def test_presets_have_the_published_sizes(preset):
    model = TokenFormerLM(lm_config(preset), device="meta")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PARAMETERS.get(preset, count)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("theta", THETAS)
def test_with_a_cache_it_computes_the_same(kind, theta):
    """Also: no token sees a later one, which the cache does not have yet."""
    model, tokens = build(theta=theta, **kind), torch.randint(61, (3, 17))
    expected, cache = model(tokens), KVCache()
    parts = [model(tokens[:, :5], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(5, 11)]
    parts.append(model(tokens[:, 11:], cache=cache))
    assert cache.get_seq_length() == 17
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_padding_on_either_side_changes_nothing(kind):
    model, tokens = build(**kind), torch.randint(61, (1, 9))
    expected = model(tokens)
    filling, other = torch.randint(61, (1, 5)), torch.randint(61, (1, 14))
    for parts, own in (((filling, tokens), slice(5, 14)), ((tokens, filling), slice(0, 9))):
        mask = torch.ones(2, 14)
        mask[0] = 0
        mask[0, own] = 1
        logits = model(torch.cat((torch.cat(parts, dim=1), other)), attention_mask=mask)
        torch.testing.assert_close(logits[:1, own], expected)
        torch.testing.assert_close(logits[1:], model(other))
        assert logits.isfinite().all()


def test_the_configuration_follows_the_layers():
    model = TokenFormerLM(LMConfig(vocab_size=61, embed_dim=32, depth=2, num_heads=2))
    grow(model.blocks[1], num_ffn_param_tokens=192)  # the model is not told
    nest(model, (0.5,))
    assert (model.config.num_ffn_param_tokens, model.config.nested) == ([128, 192], (0.5,))
    small = extract(model, 0.5)
    assert (small.config.num_ffn_param_tokens, small.config.nested) == ([64, 96], ())
    rebuilt, tokens = TokenFormerLM(small.config), torch.randint(61, (2, 9))
    rebuilt.load_state_dict(small.state_dict())
    torch.testing.assert_close(rebuilt(tokens), small(tokens), rtol=0, atol=0)


def test_what_does_not_fit_is_said():
    model, cache = build(), KVCache()
    model(torch.zeros(1, 40, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match=r"has 41 tokens, but context_length is 40: shorten"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match="rotates 1 dimensions of a head: give"):
        LMConfig(embed_dim=16, num_heads=4)
    with pytest.raises(InputError, match=r"preset must be one of 150m, .*, but got '124m'"):
        lm_config("124m")
