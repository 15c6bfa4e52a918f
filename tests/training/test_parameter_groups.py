"""An optimiser with one group for each setting takes the same steps as before."""

from types import SimpleNamespace

import pytest
import timm.optim
import torch
from mmengine.optim import OptimWrapper, ReduceOnPlateauLR, build_optim_wrapper
from mmengine.registry import DefaultScope
from mmpretrain.registry import MODELS

from tokenformer_vit.errors import InputError
from tokenformer_vit.mmpretrain_names import timm_state_dict
from tokenformer_vit.training.config import load_config
from tokenformer_vit.training.export import as_timm_model
from tokenformer_vit.training.parameter_groups import (
    align_schedulers,
    check_start,
    fit_groups,
)

LAYER_DECAY = {"layer_decay_rate": 0.5, "norm_decay_mult": 0.0, "bias_decay_mult": 0.0}
CONSTRUCTORS = [
    ("MergedOptimWrapperConstructor", "DefaultOptimWrapperConstructor", {}),
    (
        "MergedLayerDecayConstructor",
        "LearningRateDecayOptimWrapperConstructor",
        {"paramwise_cfg": LAYER_DECAY},
    ),
]


@pytest.fixture(autouse=True)
def scope():
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        yield


def make(config, constructor, **options):
    cfg = load_config(config)
    cfg.optim_wrapper.optimizer.update(options.pop("optimizer", {}))
    torch.manual_seed(1)
    model = MODELS.build({**cfg.model, "data_preprocessor": cfg.data_preprocessor})
    wrapper = {**cfg.optim_wrapper, **options, "constructor": constructor}
    return model, build_optim_wrapper(model, wrapper).optimizer


def names_by_setting(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def step(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(("ours", "stock", "options"), CONSTRUCTORS)
@pytest.mark.parametrize("kind", [{}, {"amsgrad": True}])
def test_steps_are_those_of_the_stock_constructors_to_the_last_bit(
    config, ours, stock, options, kind
):
    model, optimizer = make(config, ours, optimizer=kind, **options)
    other, loop = make(config, stock, optimizer={**kind, "fused": True}, **options)
    settings = names_by_setting(model, optimizer)
    assert settings == names_by_setting(other, loop)
    assert len(optimizer.param_groups) == len(set(settings.values()))
    assert len(loop.param_groups) == len(settings)
    for _ in range(5):
        step(other, loop)
        for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
            mine.grad = yours.grad.clone()
        optimizer.step()
    for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({}, {"foreach": None, "fused": True}),
        ({"foreach": True}, {"foreach": True, "fused": None}),
        ({"foreach": False}, {"foreach": False, "fused": None}),
        ({"type": "RAdam", "betas": (0.9, 0.99)}, {"foreach": None}),  # has no fused form
    ],
)
def test_the_config_of_an_optimiser_has_the_last_word(config, optimizer, expected):
    _, made = make(config, "MergedOptimWrapperConstructor", optimizer=optimizer)
    assert {key: made.defaults[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("lamb", "Lamb", {}),
        ("clamb", "Lamb", {"caution": True}),
        ("cadamw", "AdamWLegacy", {"caution": True}),
        ("muon", "Muon", {}),
        ("nadamuon", "Muon", {"algo": "adamuon", "nesterov": True}),
    ],
)
def test_an_optimiser_of_timm_takes_the_steps_that_timm_makes(config, name, kind, options):
    common = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.05, "eps": 1e-8}
    own = {"type": f"timm.optim.{kind}", **common, **options}
    model, optimizer = make(config, "MergedOptimWrapperConstructor", optimizer=own)
    assert type(optimizer) is getattr(timm.optim, kind)
    other = as_timm_model(model)
    names = timm_state_dict(dict(model.named_parameters()))
    if kind == "Muon":
        common |= {"momentum": 0.95, "fallback_list": ("patch_embed.*", "head.*")}
    stock = timm.optim.create_optimizer_v2(other, name, **common)
    assert len(optimizer.param_groups) == (3 if kind == "Muon" else 2)
    for _ in range(3):
        for name, parameter in other.named_parameters():
            names[name].grad = torch.randn_like(parameter)
            parameter.grad = names[name].grad.clone()
        optimizer.step()
        stock.step()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(names[name], parameter)


@pytest.mark.parametrize("paramwise", [True, False])
@pytest.mark.parametrize("constructor", [ours for ours, *_ in CONSTRUCTORS])
def test_muon_takes_the_matrices_of_the_blocks(config, constructor, paramwise):
    if constructor == "MergedLayerDecayConstructor":
        options: dict = {"paramwise_cfg": LAYER_DECAY if paramwise else {}}
    else:
        options = {} if paramwise else {"paramwise_cfg": None}
    own = {"type": "timm.optim.Muon"}
    model, optimizer = make(config, constructor, optimizer=own, **options)
    other, plain = make(config, constructor, **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    step(model, optimizer)
    found = {names[p] for p, state in optimizer.state.items() if "momentum_buffer" in state}
    layers = ("attn.query", "attn.key", "attn.value", "attn.proj", "mlp")
    parts = ("key_param_tokens", "value_param_tokens")
    expected = [f"blocks.{b}.{layer}.{part}" for b in (0, 1) for layer in layers for part in parts]
    assert found == {f"backbone.model.{name}" for name in expected}
    assert len(optimizer.state) == len(names)
    names_and_settings = (names_by_setting(*each) for each in ((model, optimizer), (other, plain)))
    assert next(names_and_settings) == next(names_and_settings)  # Muon changes no rate, no decay


def test_the_muon_of_pytorch_is_refused(config):
    with pytest.raises(InputError, match=r"give timm\.optim\.Muon"):
        make(config, "MergedOptimWrapperConstructor", optimizer={"type": "Muon"})


@pytest.mark.parametrize(
    "own",
    [
        {"type": "timm.optim.Muon"},
        {"type": "timm.optim.Muon", "algo": "adamuon", "nesterov": True},
        {"type": "timm.optim.Lamb", "caution": True},
    ],
    ids=["muon", "nadamuon", "clamb"],
)
def test_a_loaded_optimiser_of_timm_goes_on_as_if_it_had_not_stopped(config, own, tmp_path):
    model, optimizer = make(config, "MergedOptimWrapperConstructor", optimizer=own)
    step(model, optimizer)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pth")
    other, resumed = make(config, "MergedOptimWrapperConstructor", optimizer=own)
    weights, state = torch.load(tmp_path / "state.pth", weights_only=True)
    other.load_state_dict(weights)
    fit_groups(resumed, state["param_groups"])
    resumed.load_state_dict(state)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        two.grad = one.grad.clone()
    optimizer.step()
    resumed.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_head_of_zeros_is_refused_with_lamb(config):
    with pytest.raises(InputError, match=r"timm\.optim\.Lamb, .*TruncNormal"):
        load_config(config, {"optim_wrapper.optimizer.type": "timm.optim.Lamb"})
    load_config(config, {"optim_wrapper.optimizer.type": "timm.optim.Muon"})
    head = {"model.head.init_cfg": {"type": "TruncNormal", "layer": "Linear", "std": 0.02}}
    load_config(config, {"optim_wrapper.optimizer.type": "timm.optim.Lamb", **head})


def test_an_unknown_optimiser_is_named(config):
    for name in ("timm.optim.Lmb", "Lmb"):
        with pytest.raises(InputError, match=rf"type is {name}, .*timm\.optim\.Lamb"):
            make(config, "MergedOptimWrapperConstructor", optimizer={"type": name})


def last(work_dir):
    return torch.load((work_dir / "last_checkpoint").read_text(), weights_only=True)


def test_a_plateau_also_lowers_the_rates_of_new_pairs():
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": each.parameters()} for each in layers[:2]], lr=1.0)
    wrapper = OptimWrapper(optimizer)
    plateau = ReduceOnPlateauLR(wrapper, monitor="loss", rule="less", patience=0, factor=0.5)
    optimizer.add_param_group({"params": layers[2].parameters(), "lr": 0.1})
    align_schedulers(SimpleNamespace(optim_wrapper=wrapper, param_schedulers=[plateau]))
    for _ in range(2):  # the second is no better
        plateau.step({"loss": 1.0})
    assert wrapper.get_lr() == {"base_lr": [0.5], "lr": [0.5, 0.5, 0.05]}


GROWTH = [
    {"epoch": 1, "num_qkv_param_tokens": 36, "num_ffn_param_tokens": 120},
    {"epoch": 2, "num_qkv_param_tokens": 48, "num_proj_param_tokens": 32},
]


@pytest.mark.slow
def test_a_run_with_muon_grows_and_is_resumed_exactly(train, config, tmp_path):
    path = tmp_path / "muon.py"
    schedule = [{"epoch": 1, "num_ffn_param_tokens": 112}]
    hook = {"type": "GrowthHook", "schedule": schedule, "new_lr_scale": 3.0}
    path.write_text(
        f"_base_ = {str(config)!r}\n"
        f"custom_hooks = [{hook!r}]\n"
        "optim_wrapper = dict(\n"
        "    clip_grad=dict(max_norm=1.0), optimizer=dict(type='timm.optim.Muon', nesterov=True)\n"
        ")\n"
        "train_cfg = dict(max_epochs=3)\n"
    )
    train = train.of(path)
    train(tmp_path / "whole", "--amp")
    for start in (1, 2):  # before and after the growth
        resumed = tmp_path / f"resumed_{start}"
        train(resumed, "--amp", "--resume", str(tmp_path / "whole" / f"epoch_{start}.pth"))
        one, other = (last(each) for each in (tmp_path / "whole", resumed))
        for part in ("state_dict", "ema_state_dict"):
            for name, tensor in one[part].items():
                assert torch.equal(tensor, other[part][name]), name
    keys = [
        state["momentum_buffer"].shape
        for state in one["optimizer"]["state"].values()
        if "momentum_buffer" in state
    ]
    assert len(keys) == 2 * (2 * 4 + 2 * 2)  # old and new pairs of an FFN are two matrices


@pytest.mark.parametrize("start", [True, [3], "x", None])
def test_a_start_of_another_type_is_left_to_mmengine(start):
    head = {"init_cfg": start}
    check_start({"model": {"head": head}, "optim_wrapper": {"optimizer": {"type": "Lamb"}}}, "x.py")
