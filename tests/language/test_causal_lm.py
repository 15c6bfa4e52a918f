"""The language model against its definition: counts, causality, positions, cache, padding."""

import pytest
import torch
from transformers import DynamicCache

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer_vit.models import LM_PRESETS, LMConfig, lm_config
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
    config = TokenFormerConfig(**{**config, "rotary_share": 0.5, **changes})
    model = TokenFormerForCausalLM(config).double().eval()
    model.model.embedding.weight.data.mul_(20)  # so that the token at hand is not drowned
    return model


@pytest.mark.parametrize("preset", LM_PRESETS)
def test_presets_have_the_published_sizes(preset):
    with torch.device("meta"):
        model = TokenFormerForCausalLM(TokenFormerConfig(**vars(lm_config(preset))))
    assert model.num_parameters() == PARAMETERS.get(preset, model.num_parameters())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("theta", THETAS)
def test_with_a_cache_it_computes_the_same(kind, theta):
    """Also: no token sees a later one, which the cache does not have yet."""
    model, tokens = build(theta=theta, **kind), torch.randint(61, (3, 17))
    expected, cache = model(tokens).logits, DynamicCache()
    parts = [model(tokens[:, :5], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(5, 11)]
    parts.append(model(tokens[:, 11:], cache=cache))
    assert cache.get_seq_length() == 17
    torch.testing.assert_close(torch.cat([part.logits for part in parts], dim=1), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_padding_on_either_side_changes_nothing(kind):
    model, tokens = build(**kind), torch.randint(61, (1, 9))
    expected = model(tokens).logits
    filling, other = torch.randint(61, (1, 5)), torch.randint(61, (1, 14))
    for parts, own in (((filling, tokens), slice(5, 14)), ((tokens, filling), slice(0, 9))):
        mask = torch.ones(2, 14)
        mask[0] = 0
        mask[0, own] = 1
        logits = model(torch.cat((torch.cat(parts, dim=1), other)), attention_mask=mask).logits
        torch.testing.assert_close(logits[:1, own], expected)
        torch.testing.assert_close(logits[1:], model(other).logits)
        assert logits.isfinite().all()


def test_what_does_not_fit_is_said():
    model, cache = build(), DynamicCache()
    model(torch.zeros(1, 40, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match=r"has 41 tokens, but context_length is 40: shorten"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match="rotates 1 dimensions of a head: give"):
        LMConfig(embed_dim=16, num_heads=4)
    with pytest.raises(InputError, match=r"preset must be one of 150m, .*, but got '124m'"):
        lm_config("124m")
