"""A model with separate old and new pairs is saved, averaged and copied like any other."""

import copy
import io
import json
import pickle
import warnings

import pytest
import timm
import timm.optim
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.model import ExponentialMovingAverage
from safetensors.torch import load_file
from timm.layers import set_scriptable
from timm.models import save_for_hf
from timm.utils import CheckpointSaver, ModelEmaV3

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import freeze_old, grow, join_tokens, pattention_layers
from tokenformer_vit.layers.split import TOKENS, is_split, token_segments

SHAPE = {
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "img_size": 16,
    "patch_size": 8,
    "num_classes": 3,
}
LARGER = {"num_qkv_param_tokens": 24, "num_ffn_param_tokens": 80}


def build(**kwargs):
    return timm.create_model("tokenformer_tiny", **SHAPE, **kwargs).eval()


def images():
    return torch.randn(2, 3, 16, 16)


def pair(**kwargs):
    """Return a split model, and an ordinary one of the same weights."""
    split = grow(build(**kwargs), **LARGER, init="random", split=True)
    plain = timm.create_model("tokenformer_tiny", **split._model_args).eval()
    plain.load_state_dict(split.state_dict())
    assert any(map(is_split, pattention_layers(split).values()))
    return split, plain


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(actual, expected):
    assert list(actual) == list(expected)  # some code goes by position
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def move(model, plain):
    """Change the weights of a split model and its ordinary twin alike, part by part."""
    with torch.no_grad():
        for name, layer in pattention_layers(model).items():
            twin = plain.get_submodule(name)
            for token in TOKENS:
                change = torch.randn_like(getattr(twin, token))
                getattr(twin, token).add_(change)
                start = 0
                for part in token_segments(layer, token):
                    part.add_(change[start : start + len(part)])
                    start += len(part)
    assert_equal(weights(model), weights(plain))


def reload(model):
    return pickle.loads(pickle.dumps(model))


def save_and_load(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, reload, save_and_load, lambda model: model.double().float()]
)
def test_a_state_dict_is_that_of_an_ordinary_model_and_writes_through(duplicate):
    model, plain = pair(pattention_args={"learn_tau": True})
    x = images()
    model = duplicate(model)
    assert torch.equal(model(x), plain(x))
    assert_equal(weights(model), weights(plain))
    for tensor in model.state_dict().values():
        tensor.add_(1.0)
    for tensor in plain.state_dict().values():
        tensor.add_(1.0)
    assert torch.equal(model(x), plain(x))
    model.load_state_dict(build(**LARGER).state_dict() | weights(plain))
    assert_equal(weights(model), weights(plain))


AVERAGES = {
    "timm v3": lambda model: ModelEmaV3(model, decay=0.9, foreach=True),
    "mmengine buffers": lambda model: ExponentialMovingAverage(
        model, momentum=0.1, update_buffers=True
    ),
}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize(
    "before",
    [
        lambda model: model,
        copy.deepcopy,
        lambda model: reload(model).double(),
    ],
    ids=["as grown", "deepcopy", "pickle and cast"],
)
def test_the_average_of_a_split_model_is_that_of_an_ordinary_one(average, before):
    models = [before(model) for model in pair()]
    averages = [average(model) for model in models]
    start = weights(averages[0].module)
    for _ in range(3):
        move(*models)
        for each, model in zip(averages, models, strict=True):
            update = getattr(each, "update_parameters", None) or each.update
            update(model)
    split, plain = (weights(each.module) for each in averages)
    assert_equal(split, plain)
    keys = "blocks.0.mlp.key_param_tokens"
    for rows in (slice(0, 64), slice(64, None)):  # old pairs and new ones moved
        assert not torch.allclose(split[keys][rows], start[keys][rows])
    x = images().to(split[keys])
    assert torch.equal(averages[0].module(x), averages[1].module(x))


def test_timm_saves_what_timm_loads(tmp_path):
    model, plain = pair()
    x = images()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(x), plain(x))

    optimizer = torch.optim.AdamW(model.parameters())
    ema = ModelEmaV3(model)
    saver = CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    checkpoint = torch.load(tmp_path / "last.pth.tar", weights_only=True)
    for name in ("state_dict", "state_dict_ema"):
        assert_equal(checkpoint[name], weights(plain))


def test_hugging_face_saves_what_it_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    model, plain = pair()
    x = images()
    save_for_hf(model, tmp_path, safe_serialization=True)
    # transformers 5.23 gives this argument itself, and fails where timm 1.0.31 has written it, too.
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"].pop("num_classes", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    wrapper = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(wrapper(x).logits, plain(x))
    grow(wrapper, num_ffn_param_tokens=96, init="random", split=True)
    wrapper.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    own = weights(wrapper.timm_model)
    assert saved.keys() == own.keys()
    assert_equal({name: saved[name] for name in own}, own)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(x).logits, wrapper(x).logits)


def test_torchscript_and_export():
    with set_scriptable(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, plain = pair()
        scripted = torch.jit.script(model)
        file = io.BytesIO()
        torch.jit.save(scripted, file)
        file.seek(0)
        x = images()
        torch.testing.assert_close(torch.jit.load(file)(x), plain(x))
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), plain(x))
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        torch.testing.assert_close(torch.export.load(file).module()(x), plain(x))


def test_a_sharded_model_is_saved_joined(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    model, plain = pair()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fsdp.fully_shard(model)
        saved = {
            name: tensor.full_tensor()
            for name, tensor in model.state_dict().items()
            if hasattr(tensor, "full_tensor")
        }
    finally:
        dist.destroy_process_group()
    for name, parameter in plain.named_parameters():
        assert torch.equal(saved[name], parameter), name


def test_joining_keeps_what_is_computed_and_the_state_of_the_optimizer():
    model, plain = pair()
    x = images()
    freeze_old(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    F.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    optimizer.step()
    before, old, new = model(x), *token_segments(model.blocks[0].mlp, TOKENS[0])
    moments, num_old = optimizer.state[new]["exp_avg"].clone(), len(old)
    assert old not in optimizer.state  # it was frozen
    assert join_tokens(model, optimizer) is model
    assert not any(map(is_split, pattention_layers(model).values()))
    assert torch.equal(model(x), before)
    joined = model.blocks[0].mlp.key_param_tokens
    assert joined is old
    assert torch.equal(optimizer.state[joined]["exp_avg"][num_old:], moments)
    assert joined.requires_grad
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    optimizer.step()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    join_tokens(plain)  # nothing to do
    with pytest.raises(InputError, match="give a TokenFormer"):
        join_tokens(torch.nn.Linear(2, 2))
