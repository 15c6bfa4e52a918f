"""Sizes of a model: shares of the pairs of its layers."""

import json

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import count_pairs
from tokenformer_vit.models.checkpoints import load_model, save_model
from tokenformer_vit.models.sizes import at_size, find_layers


def used(model):
    return {name: layer.num_used for name, layer in find_layers(model).items()}


@pytest.mark.parametrize("kinds", [None, ["ffn"]])
def test_a_size_is_a_share_of_the_layers_of_its_kinds(small, kinds):
    model = small(nested=(0.5, 1.0, 0.25), nested_kinds=kinds)
    assert model.sizes == (0.25, 0.5, 1.0)
    pairs = count_pairs(model)
    chosen = {name: count for name, count in pairs.items() if not kinds or name.endswith("mlp")}
    taus = {name for name, tensor in model.state_dict().items() if tensor.shape == (3,)}
    assert taus == {f"{name}.tau" for name in chosen}
    for size in (0.3, 1e-9):
        model.set_size(size)
        shares = {name: max(1, round(size * count)) for name, count in chosen.items()}
        assert used(model) == {**pairs, **shares}
    model.set_size(None)
    assert used(model) == pairs


@pytest.mark.parametrize("size", [0, 1.5, -0.25, 2])
def test_sizes_out_of_range_are_refused_and_change_nothing(small, size):
    model = small(nested=(0.25,))
    model.set_size(0.5)
    before = used(model)
    with pytest.raises(InputError, match=f"above 0 and at most 1, but got {size!r}"):
        model.set_size(size)
    assert used(model) == before


def test_nested_sizes_that_are_none_are_refused(small):
    with pytest.raises(InputError, match=r"shares, such as .*, not \(0.5, 2\)"):
        small(nested=(0.5, 2))
    with pytest.raises(InputError, match=r"some of .*'ffn'.*, but got 'mlp'"):
        small(nested=(0.5,), nested_kinds=["mlp"])


def test_the_former_size_is_in_use_after_a_with_block(small, images):
    model, x = small(nested=(0.25, 0.5)), images()
    model.set_size(0.5)
    before = model(x)
    with at_size(model, 0.25), at_size(model, 0.3):
        assert not torch.equal(model(x), before)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("kinds", [None, ["qkv", "ffn"]])
def test_nested_sizes_are_saved_with_the_model(small, images, tmp_path, kinds):
    sizes = (0.25, 0.75)
    model, x = small(nested=sizes, nested_kinds=kinds), images()
    for layer in find_layers(model).values():
        layer.tau.mul_(torch.rand(layer.tau.shape) + 0.5)
    save_model(model, tmp_path / "model")
    saved = json.loads((tmp_path / "model/config.json").read_text())["model_args"]
    assert saved["nested"] == [*sizes]
    assert saved.get("nested_kinds") == kinds
    loaded = load_model(None, tmp_path / "model")
    assert loaded.sizes == model.sizes == (*sizes, 1.0)
    for kwargs in ({"nested": ()}, {"nested": (0.25,)}, {"nested": (0.25, 0.5)}):
        with pytest.raises(InputError, match=r"nested|tau is"):
            load_model(None, tmp_path / "model", **kwargs)
    for size in (*sizes, 0.6):
        model.set_size(size)
        loaded.set_size(size)
        assert torch.equal(loaded(x), model(x))


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
