"""A model with separate old and new pairs is saved and copied like any other."""
# pyright: reportPossiblyUnboundVariable=false

import copy
import pickle
import warnings

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import set_scriptable
from timm.models import save_for_hf

from tokenformer_vit.growth import grow, join_tokens
from tokenformer_vit.layers.pattention import TOKENS, join_state_dict
from tokenformer_vit.models.checkpoints import load_model, save_model

from .conftest import LINEAR, SHAPE, assert_equal, build, images, step

LARGER = {"num_qkv_param_tokens": 48, "num_ffn_param_tokens": 160}


def twins(**kwargs):
    """Return a split model, and an ordinary one of the same weights."""
    split, plain = (
        grow(build(**kwargs), **LARGER, init="random", split=True),
        build(**LARGER, **kwargs),
    )
    for parameter in split.parameters():  # biases start at 0
        parameter.data += 0.1 if parameter.ndim == 1 else 0
    plain.load_state_dict(split.state_dict())
    return split, plain


def reload(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, reload, lambda model: model.double().float()])
@pytest.mark.parametrize("how", [{"pattention_args": {"learn_tau": True}}, LINEAR])
def test_it_is_copied_and_loads_what_an_ordinary_model_loads(duplicate, how):
    model, plain = twins(**how)
    model, x = duplicate(model), images()
    assert torch.equal(model(x), plain(x))
    assert_equal(join_state_dict(model.state_dict()), plain.state_dict())
    other = build(**LARGER, **how)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("how", [{}, {"theta": "softmax"}, LINEAR])
def test_timm_saves_what_it_loads(how, tmp_path):
    (model, plain), x = twins(**how), images()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), plain(x))
    save_model(model, tmp_path / "export")
    assert not any("new_" in name for name in load_file(tmp_path / "export/model.safetensors"))
    assert torch.equal(load_model(None, tmp_path / "export")(x), plain(x))
    torch.save({"state_dict": model.state_dict()}, tmp_path / "run.pth")
    loaded = load_model("tokenformer_tiny", tmp_path / "run.pth", **SHAPE, **LARGER, **how)
    assert torch.equal(loaded.eval()(x), plain(x))


@pytest.mark.parametrize("all_parameters", [True, False])
def test_joining_keeps_what_is_computed_and_the_state_of_the_optimizer(all_parameters):
    model, x = build(), images()
    old = model.blocks[0].mlp.key_param_tokens
    grow(model, **LARGER, freeze="old")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters() if all_parameters else trained, lr=1e-2)
    step(model, optimizer, 2)
    before, new = model(x), model.blocks[0].mlp.parts(TOKENS[0])[1]
    moments = optimizer.state[new]["exp_avg"].clone()
    assert old not in optimizer.state
    assert join_tokens(model, optimizer) is model
    assert torch.equal(model(x), before)
    assert model.blocks[0].mlp.key_param_tokens is old
    assert torch.equal(optimizer.state[old]["exp_avg"][128:], moments)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert {p for p in model.parameters() if p.requires_grad} <= held <= {*model.parameters()}
    step(model, optimizer)


@torch.no_grad()
def test_a_script_and_compiled_blocks_compute_the_same():
    with set_scriptable(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (model, plain), x = twins(**LINEAR, depth=1), images()
        torch.testing.assert_close(torch.jit.script(model)(x), plain(x))
    compiled = torch.compile(model.blocks[0], backend="aot_eager", fullgraph=True, dynamic=True)
    for z in (torch.randn(count, 17, 32) for count in (1, 2, 50)):
        torch.testing.assert_close(compiled(z), plain.blocks[0](z))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("how", [{}, LINEAR])
def test_a_sharded_model_computes_the_same(how):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    (split, plain), x = twins(**how), images()
    fsdp.fully_shard(split)
    torch.testing.assert_close(split(x), plain(x))
    split(x).square().sum().backward()
    assert all(p.grad is not None for p in split.parameters())
    state = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in split.state_dict().items()}
    assert_equal(join_state_dict(state), plain.state_dict())
