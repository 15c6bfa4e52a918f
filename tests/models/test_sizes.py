"""Sizes of a model, by share, by kind and by layer."""

import json

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.models.sizes import at_size, find_layers, nested_sizes, size_counts


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
    model.set_size({"qkv": 0.5, "ffn": 7})
    chosen = {name: 24 for name in pairs if name.endswith(("query", "key", "value"))}
    chosen |= {name: 7 for name in pairs if name.endswith("mlp")}
    assert used(model) == {**pairs, **chosen}
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
    with pytest.raises(InputError, match=r"'mlps'.*qkv, proj and ffn"):
        model.set_size({"mlps": 0.5})
    assert used(model) == before


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
    for kwargs in ({"nested": ()}, {"nested": (0.25, 0.75)}):
        with pytest.raises(InputError, match="nested"):
            load_model(None, tmp_path / "model", **kwargs)
    for size in (*sizes, 0.6):
        model.set_size(size)
        loaded.set_size(size)
        assert torch.equal(loaded(x), model(x))


@pytest.mark.slow
def test_export_keeps_the_size(small, images):
    model, x = small(depth=1, nested=(0.25, 0.5)), images()
    model.set_size(0.25)
    program = torch.export.export(model, (x,)).module()
    expected = model(x)
    model.set_size(None)
    torch.testing.assert_close(program(x), expected)
    assert (model(x) - expected).abs().max() > 0


def test_a_size_under_gradient_checkpointing_is_refused(small, images):
    """The backward pass would compute the blocks again with all pairs."""
    model = small(nested=(0.5,)).train()
    with at_size(model, 0.5):
        model(images())
    model.set_grad_checkpointing()
    with pytest.raises(InputError, match=r"gradient checkpointing is on.*switch it off"):
        at_size(model, 0.5).__enter__()
    with torch.no_grad(), at_size(model, 0.5):
        model(images())


def test_sizes_are_read_from_layers_in_the_shortest_words(small):
    model = small(nested=({"ffn": 0.5, "qkv": 24, "proj": 24}, 0.75), num_ffn_param_tokens=[40, 80])
    assert nested_sizes(model, model.sizes) == model.sizes
    for known, read in zip(model.sizes, nested_sizes(model), strict=True):
        layers = find_layers(model)  # a number by layer, where those of one kind differ
        assert size_counts(layers, read) == size_counts(layers, known)
    assert nested_sizes(small(nested=(0.5,))) == (0.5, 1.0)
