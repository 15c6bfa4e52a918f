"""The closed-form costs of language models equal PyTorch's counts, part by part."""

import pytest
import torch
from torch import nn

from tokenformer_vit.benchmarking.costs import PARTS, model_costs, total, training_flops
from tokenformer_vit.benchmarking.measures import counted_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.models import LMConfig, TokenFormerLM

pytestmark = pytest.mark.usefixtures("plain_attention")
SHAPE = {"vocab_size": 61, "context_length": 17, "embed_dim": 24, "depth": 2, "num_heads": 3}
PAIRS = {"num_qkv_param_tokens": 20, "num_proj_param_tokens": 28, "num_ffn_param_tokens": 50}
MODELS = {
    "rotary": {**PAIRS},
    "learned": {"positions": "learned", "norm": "bias", "pattention_args": {"learn_tau": True}},
    "untied": {"tie_embeddings": False, "theta": "softmax"},
}
PARTS_OF = {
    "ours": {
        "qkv": ("attn.query", "attn.key", "attn.value"),
        "output": ("attn.proj",),
        "feed_forward": ("mlp",),
    },
    "learned": {"qkv": ("attn.c_attn",), "output": ("attn.c_proj",), "feed_forward": ("mlp",)},
    "rotary": {
        "qkv": ("attention.query_key_value",),
        "output": ("attention.dense",),
        "feed_forward": ("mlp",),
    },
}


def build(**changes):
    model = TokenFormerLM(LMConfig(**{**SHAPE, "rotary_share": 0.5, **changes}))
    for layer in model.modules():
        if hasattr(layer, "backend"):
            layer.backend = "reference"
    return model


def transformer(positions="learned", **changes):
    pytest.importorskip("transformers", reason="pip install '.[language]'")
    from tokenformer_vit.language import transformer_lm

    return transformer_lm(**SHAPE, positions=positions, **changes)


def count(model, num_tokens=17, backward=False):
    """Count the FLOPs of a sequence with PyTorch, by module."""

    def run():
        out = model(torch.randint(61, (1, num_tokens)))
        if backward:
            (out if torch.is_tensor(out) else out.logits).sum().backward()

    counted = counted_flops(run)
    # Some versions of transformers compute the angles of the rotation by a matrix product.
    angles = sum(flops for name, flops in counted.items() if name.endswith(".rotary_emb"))
    return {**counted, "Global": counted["Global"] - angles}


def check(model, parts, num_tokens=None):
    costs, counted = model_costs(model, num_tokens), count(model, num_tokens or 17)
    assert list(costs) == list(PARTS)
    assert total(costs).forward_flops == counted["Global"]

    def of(*modules):
        ends = tuple(f".{module}" for module in modules)
        return sum(flops for name, flops in counted.items() if name.endswith(ends))

    for part, modules in parts.items():
        assert costs[part].forward_flops == of(*modules) > 0
    projections = costs["qkv"].forward_flops + costs["output"].forward_flops
    assert costs["token_token"].forward_flops == of("attn", "attention") - projections > 0
    within = sum(costs[part].forward_flops for part in (*parts, "token_token"))
    assert costs["head"].forward_flops == counted["Global"] - within > 0
    assert costs["embedding"].forward_flops == costs["other"].forward_flops == 0
    assert total(costs).parameters == sum(p.numel() for p in model.parameters())
    return costs


def check_training(model, num_tokens):
    counted = count(model, num_tokens, backward=True)["Global"]
    assert training_flops(model, num_tokens) == counted


@pytest.mark.parametrize("num_tokens", [None, 9])
@pytest.mark.parametrize("case", MODELS)
def test_a_tokenformer(case, num_tokens):
    model = build(**MODELS[case])
    costs = check(model, PARTS_OF["ours"], num_tokens)
    assert costs["head"].parameters == (61 * 24 if case == "untied" else 0)
    assert costs["embedding"].parameters == (61 + (17 if case == "learned" else 0)) * 24
    check_training(model, num_tokens or 17)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("tie", [True, False])
def test_a_transformer(tie, positions):
    model = transformer(positions, hidden_features=50, tie_embeddings=tie)
    costs = check(model, PARTS_OF[positions])
    assert costs["head"].parameters == (0 if tie else 61 * 24)
    assert costs["embedding"].parameters == (61 + (17 if positions == "learned" else 0)) * 24
    assert costs["qkv"].parameters == 2 * 3 * (24 + 1) * 24
    assert costs["output"].parameters == 2 * (24 + 1) * 24
    check_training(model, 17)


def test_after_growth_and_for_pairs_that_are_not_read():
    model = build(**PAIRS)
    before = total(model_costs(model))
    grow(model, num_ffn_param_tokens=75, num_qkv_param_tokens=30)
    whole = total(check(model, PARTS_OF["ours"]))
    assert whole.parameters - before.parameters == 2 * (2 * 24 * (25 + 3 * 10))
    model.blocks[0].attn.query.active = torch.arange(0, 30, 3)
    costs = total(check(model, PARTS_OF["ours"]))
    assert whole.forward_flops - costs.forward_flops == 2 * 17 * 20 * 2 * 24


@pytest.mark.parametrize("make", [build, transformer])
def test_a_module_that_holds_one(make):
    model = make()
    other = nn.ModuleDict({"model": model, "other": nn.Linear(3, 3)})
    assert model_costs(other, 9) == model_costs(model, 9)


def test_that_of_transformers():
    language = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    config = language.TokenFormerConfig(**SHAPE, rotary_share=0.5)
    assert model_costs(language.TokenFormerForCausalLM(config)) == model_costs(build())


def test_other_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=24, n_layer=1, n_head=3, add_cross_attention=True)
    with torch.device("meta"), pytest.raises(InputError, match="without cross-attention"):
        model_costs(transformers.GPT2LMHeadModel(config))
