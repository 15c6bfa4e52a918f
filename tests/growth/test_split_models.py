"""A model with separate old and new pairs is saved, averaged and copied like any other."""

import copy
import pickle

import pytest
import timm
import torch
import torch.distributed as dist
from timm.models import save_for_hf
from timm.utils import ModelEmaV3

from tokenformer_vit.growth import grow, join_tokens, pattention_layers
from tokenformer_vit.layers.split import TOKENS, is_split, token_segments

from .conftest import assert_equal, build, copied, images, step

LARGER = {"num_qkv_param_tokens": 48, "num_ffn_param_tokens": 160}


def twins(**kwargs):
    """Return a split model, and an ordinary one of the same weights."""
    split, plain = (
        grow(build(**kwargs), **LARGER, init="random", split=True),
        build(**LARGER, **kwargs),
    )
    plain.load_state_dict(split.state_dict())
    assert is_split(split.blocks[1].attn.query)
    return split, plain


def reload(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, reload, lambda model: model.double().float()])
def test_a_state_dict_is_that_of_an_ordinary_model_and_writes_through(duplicate):
    model, plain = twins(pattention_args={"learn_tau": True})
    model, x = duplicate(model), images()
    assert_equal(model.state_dict(), plain.state_dict())
    for tensor in (*model.state_dict().values(), *plain.state_dict().values()):
        tensor.add_(1.0)
    assert torch.equal(model(x), plain(x))
    other = build(**LARGER, pattention_args={"learn_tau": True})
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: reload(model).double()])
def test_the_average_of_a_split_model_is_that_of_an_ordinary_one(duplicate):
    model, plain = map(duplicate, twins())
    averages = [ModelEmaV3(each, decay=0.9, foreach=True) for each in (model, plain)]
    before = copied(averages[0].module.state_dict())
    for name, layer in pattention_layers(model).items():
        for token in TOKENS:
            change = torch.randn_like(getattr(layer, token))
            plain.get_parameter(f"{name}.{token}").detach().add_(change)
            parts = token_segments(layer, token)
            for part, rows in zip(parts, change.split([*map(len, parts)]), strict=True):
                part.detach().add_(rows)
    for average, each in zip(averages, (model, plain), strict=True):
        average.update(each)
    after = averages[0].module.state_dict()
    assert_equal(after, averages[1].module.state_dict())
    moved = after["blocks.0.mlp.key_param_tokens"] - before["blocks.0.mlp.key_param_tokens"]
    assert moved.abs().amax(dim=1).min() > 1e-3  # old pairs and new ones


def test_timm_saves_what_it_loads(tmp_path):
    (model, plain), x = twins(), images()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), plain(x))


@pytest.mark.parametrize("all_parameters", [True, False])
def test_joining_keeps_what_is_computed_and_the_state_of_the_optimizer(all_parameters):
    model, x = build(), images()
    old = model.blocks[0].mlp.key_param_tokens
    grow(model, **LARGER, freeze="old")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters() if all_parameters else trained, lr=1e-2)
    frozen = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    step(model, optimizer, 2)
    assert_equal({name: model.get_parameter(name) for name in frozen}, frozen)
    before, new = model(x), token_segments(model.blocks[0].mlp, TOKENS[0])[1]
    moments = optimizer.state[new]["exp_avg"].clone()
    assert old not in optimizer.state
    assert join_tokens(model, optimizer) is model
    assert torch.equal(model(x), before)
    assert model.blocks[0].mlp.key_param_tokens is old
    assert torch.equal(optimizer.state[old]["exp_avg"][128:], moments)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert {p for p in model.parameters() if p.requires_grad} <= held <= {*model.parameters()}
    step(model, optimizer)


def test_a_sharded_model_computes_the_same_and_is_saved_joined(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    split, plain = twins()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fsdp.fully_shard(split)
        x = images()
        torch.testing.assert_close(split(x), plain(x))
        state = split.state_dict().items()
        saved = {name: t.full_tensor() for name, t in state if hasattr(t, "full_tensor")}
    finally:
        dist.destroy_process_group()
    for name, parameter in plain.named_parameters():
        assert torch.equal(saved[name], parameter), name
