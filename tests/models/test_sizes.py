"""Sizes of a model, by share, by kind and by layer."""

import json
import warnings

import pytest
import torch
from timm.layers import set_scriptable

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs, extract
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.models.checkpoints import load_model, save_model


def used(model):
    return {
        name: layer.num_used for name, layer in model.named_modules() if hasattr(layer, "num_used")
    }


def test_a_size_is_a_share_of_every_layer_or_of_some(small):
    model = small(nested=(0.5, 1.0, 0.25))
    assert model.sizes == (0.25, 0.5, 1.0)
    pairs = count_pairs(model)
    model.set_size(0.3)
    assert used(model) == {name: round(0.3 * pairs[name]) for name in pairs}
    model.set_size({"qkv": 0.5, "blocks.1.attn.key": 7, "blocks.0.mlp": 1})
    chosen = {name: 24 for name in pairs if name.endswith(("query", "key", "value"))}
    assert used(model) == {**pairs, **chosen, "blocks.1.attn.key": 7, "blocks.0.mlp": 1}
    model.set_size(None)
    assert used(model) == pairs
    model.set_size(1e-9)
    assert set(used(model).values()) == {1}


@pytest.mark.parametrize("size", [0, 0.0, 1.5, -0.25, 2, "half", {"ffn": 0}, {"ffn": 193}])
def test_sizes_out_of_range_are_refused_and_change_nothing(small, size):
    model = small(nested=(0.25,))
    model.set_size(0.5)
    before = used(model)
    value = repr(size["ffn"] if isinstance(size, dict) else size)
    with pytest.raises(InputError, match=f"{value}.* of its .*above 0 and at most 1"):
        model.set_size(size)
    assert used(model) == before


def test_unknown_layers_are_refused(small):
    with pytest.raises(InputError, match=r"'mlps'.*qkv, proj and ffn"):
        small().set_size({"mlps": 0.5})


@pytest.mark.parametrize(
    ("nested", "said"),
    [
        (0.5, "list .*0.5"),
        ((0.5, 2), "2.* of its"),
        (({"qkv": 0.5}, {"ffn": 0.5}), r"but got \(48, 24\).*contain one another"),
    ],
)
def test_nested_sizes_that_are_none_are_refused(small, nested, said):
    with pytest.raises(InputError, match=said):
        small(nested=nested)


def test_nested_sizes_are_saved_with_the_model(small, images, tmp_path):
    sizes = [{"qkv": 12, "proj": 0.5, "ffn": 0.25}, 0.75]
    model, x = small(nested=sizes), images()
    for layer in model.modules():
        if getattr(layer, "nested_tau", None) is not None:
            layer.nested_tau.mul_(torch.rand(2) + 0.5)
    save_model(model, tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["model_args"]["nested"] == sizes
    loaded = load_model(None, tmp_path / "model")
    assert loaded.sizes == model.sizes == (*sizes, 1.0)
    for size in (*sizes, 0.6):
        model.set_size(size)
        loaded.set_size(size)
        assert torch.equal(loaded(x), model(x))


def test_weights_of_other_sizes_are_refused_in_one_line(small, tmp_path):
    save_model(small(nested=(0.25, 0.5)), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    kwargs = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64}
    for nested in ((), (0.25, 0.75)):
        with pytest.raises(InputError, match="nested") as error:
            load_model("tokenformer_tiny", file, nested=nested, **kwargs)
        assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.25, 0.4])
def test_torchscript_keeps_the_size(small, images, size):
    with set_scriptable(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = small(depth=1, nested=(0.25, 0.5)), images()
        model.set_size(size)
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))


@pytest.mark.slow
def test_export_keeps_the_size(small, images):
    model, x = small(depth=1, nested=(0.25, 0.5)), images()
    model.set_size(0.25)
    program = torch.export.export(model, (x,)).module()
    expected = model(x)
    model.set_size(None)
    torch.testing.assert_close(program(x), expected)
    assert (model(x) - expected).abs().max() > 0


def test_costs_are_those_of_the_extracted_model(small):
    model = small(nested=(0.25,))
    for size in (0.25, {"ffn": 0.1}):
        model.set_size(size)
        flops = total(model_costs(model)).forward_flops
        assert flops == total(model_costs(extract(model, size))).forward_flops


def test_a_language_model_has_sizes():
    config = LMConfig(
        vocab_size=61, context_length=40, embed_dim=32, depth=2, num_heads=2, nested=(0.25, 0.5)
    )
    model, x = TokenFormerLM(config).eval(), torch.randint(61, (2, 9))
    assert model.sizes == (0.25, 0.5, 1.0)
    for size in (0.25, 0.4, {"ffn": 0.5}):
        model.set_size(size)
        small = extract(model, size)
        assert torch.equal(small(x), model(x))
        rebuilt = TokenFormerLM(small.config).eval()
        rebuilt.load_state_dict(small.state_dict())
        assert torch.equal(rebuilt(x), model(x))
