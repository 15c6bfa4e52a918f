"""Fewer pairs, fitted anew: exact where nothing is lost, and best where something is."""

import copy
import importlib
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, measure_usage, prune, refit, removal_costs
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import from_vit, to_vit
from tokenformer_vit.ops import THETAS
from tokenformer_vit.vision.compression import tensor_batches
from tokenformer_vit.vision.datasets import open_images

SHAPE: Any = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
FORMS = [(theta, bias) for theta in THETAS for bias in (False, True)]
FORMS = [(theta, bias) for theta, bias in FORMS if not (bias and THETAS[theta].norm_order)]


def error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def net(theta="gelu", bias=True, pairs=12) -> Any:
    """Return two layers none of whose pairs the others could replace."""
    layers = Pattention(24, 20, pairs, theta, bias=bias), Pattention(20, 10, 8, theta, bias=bias)
    for layer in layers:
        nn.init.orthogonal_(layer.key_param_tokens)
        nn.init.orthogonal_(layer.value_param_tokens)
        for parameter in (layer.score_bias, layer.bias):
            if parameter is not None:
                nn.init.normal_(parameter, std=0.3)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def tokens(count=600):
    return torch.randn(count, 24)


@torch.no_grad()
@pytest.mark.parametrize(("theta", "bias"), FORMS)
def test_what_adds_nothing_goes_without_a_trace(theta, bias):
    model, x = net(theta, bias), tokens()
    before = model(x)
    assert error(refit(copy.deepcopy(model), [x], {"0": 12, "2": 8})(x), before) <= 1e-5
    for init, counts in (("zero_key", (17, 13)), ("duplicate", (24, 16))):
        if (theta, init) != ("softmax", "zero_key"):
            grown = grow(copy.deepcopy(model), dict(zip("02", counts, strict=True)), init=init)
            refit(grown, x.split(200), {"0": 12, "2": 8})
            assert [grown[0].num_param_tokens, grown[2].num_param_tokens] == [12, 8]
            assert error(grown(x), before) <= 2e-4


@torch.no_grad()
def test_it_takes_the_pair_that_the_others_replace_best():
    model, x = net(pairs=8), tokens()
    layer, wanted = copy.deepcopy(model[0]).double(), model[0](x).double()
    weights = layer.weights(x.double())
    lost = []
    for pair in range(8):
        others = torch.cat((weights[:, torch.arange(8) != pair], torch.ones(len(x), 1)), dim=1)
        fitted = others @ torch.linalg.lstsq(others, wanted).solution
        lost.append(error(fitted, wanted))
    refit(model, [x], {"0": 7})
    assert error(model[0](x).double(), wanted) <= 1.01 * min(lost) + 1e-3
    assert max(lost) > 1.2 * min(lost)  # else nothing was chosen


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_linear_tokens_become_the_best_map_of_their_rank(bias):
    model, x = net("linear", bias, pairs=20), tokens() @ torch.randn(24, 24) + 1
    wanted = model[0](x).double()
    refit(model, [x], {"0": 5})
    mean = wanted.mean(dim=0) if bias else 0
    left, sizes, right = torch.linalg.svd(wanted - mean, full_matrices=False)
    best = (left[:, :5] * sizes[:5]) @ right[:5] + mean
    assert error(model[0](x).double(), wanted) <= error(best, wanted) * 1.001 + 1e-5


@torch.no_grad()
@pytest.mark.parametrize("how", [{}, {"init_values": 0.3}, {"qkv_bias": False}])
def test_a_vit_at_half_size_is_nearer_than_a_pruned_one_and_leaves_as_a_vit(how):
    model = from_vit(VisionTransformer(**SHAPE, num_classes=10, **how))
    x = [torch.randn(16, 3, 32, 32) for _ in range(3)]
    before, pruned = model(x[0]), copy.deepcopy(model)
    # Later layers repair what earlier ones lost.
    cut, repaired = (refit(copy.deepcopy(model), x, 12, *more) for more in ((), (48, 192)))
    assert error(repaired(x[0]), before) < 0.97 * error(cut(x[0]), before)
    model.train()
    prune(pruned, measure_usage(pruned, x), 24, 24, 96)
    assert refit(model, x, 24, 24, 96) is model
    assert model.training
    assert model.blocks[1].mlp.num_param_tokens == 96
    model.eval()
    assert error(model(x[0]), before) < 0.5 * error(pruned(x[0]), before)
    assert error(to_vit(model)(x[0]), model(x[0])) <= 1e-5


@torch.no_grad()
def test_padding_of_texts_does_not_count_and_an_interruption_changes_nothing(monkeypatch):
    language = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    shape = {"vocab_size": 50, "embed_dim": 32, "depth": 2, "num_heads": 2, "context_length": 16}
    model = language.TokenFormerForCausalLM(language.TokenFormerConfig(**shape))
    one, two = torch.randint(50, (2, 6, 16))
    mask = torch.ones(6, 16, dtype=torch.long)
    mask[:3, 9:] = 0
    two = torch.where(mask == 1, one, two)
    found = [
        refit(copy.deepcopy(model), [{"input_ids": each, "attention_mask": mask}], None, None, 40)
        for each in (one, two)
    ]
    for a, b in zip(*(each.state_dict().values() for each in found), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    state, module = copy.deepcopy(model.state_dict()), importlib.import_module(refit.__module__)
    solve, calls = module.solve, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(module, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refit(model, [one], None, None, 40)
    assert all(torch.equal(state[name], each) for name, each in model.state_dict().items())
    with pytest.raises(InputError, match="128 pairs and cannot be cut to 129"):
        refit(model, [one], None, None, 129)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_costs_say_what_a_smaller_layer_loses(bias):
    model, x = net(bias=bias, pairs=20), tokens(4000)
    costs, wanted = removal_costs(model, [x])["0"], model[0](x)
    for count in (15, 10, 5):
        cut = refit(copy.deepcopy(model), [x], {"0": count})
        lost = (cut[0](x) - wanted).square().sum(dim=1).mean().item()
        assert lost == pytest.approx(costs[count:].sum().item(), rel=0.05)


class Odd(nn.Module):
    """A layer for which the sequence may come first, and one that is not called."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layer, self.other = Pattention(24, 24, 12, "gelu"), Pattention(24, 24, 12, "gelu")

    def forward(self, x):
        return self.layer(x if self.batch_first else x.transpose(0, 1))


@torch.no_grad()
def test_what_would_be_wrong_without_a_word_is_refused():
    x = torch.randn(10, 6, 24)
    refit(model := Odd(batch_first=True), [x], {"layer": 6})
    assert model.layer.num_param_tokens == 6
    with pytest.raises(InputError, match="batch is not the first dimension"):
        refit(Odd(batch_first=False), [x], {"layer": 6})
    with pytest.raises(InputError, match="does not call other"):
        refit(Odd(batch_first=True), [x], {"layer": 6, "other": 6})
    with pytest.raises(InputError, match="there is no batch: give at least one"):
        refit(Odd(batch_first=True), [], {"layer": 6})


@torch.no_grad()
@pytest.mark.parametrize("theta", THETAS)
def test_layers_without_a_signal_stay_finite(theta):
    model, x = net(theta, bias=False), tokens(50)
    model[0].key_param_tokens.zero_()
    assert refit(model, [x], {"0": 6, "2": 4})(x).isfinite().all()


@torch.no_grad()
@pytest.mark.slow
def test_a_trained_model_keeps_most_of_its_accuracy_at_half_of_its_pairs(shared_data):
    model: Any = timm.create_model("tokenformer_cifar10_micro", pretrained=True).eval()
    x, top1 = {}, []
    for split, count in (("train", 800), ("val", 10_000)):
        images = open_images(str(shared_data("cifar10")), split)
        images.keep(images.rows.argsort()[:count])
        x[split] = torch.cat([*tensor_batches(model, [*images], 500, torch.device("cpu"))])
    labels = images.labels
    for each in (model, refit(copy.deepcopy(model), x["train"].split(200), 48, 48, 192)):
        found = torch.cat([each(batch).argmax(dim=1) for batch in x["val"].split(1000)])
        top1.append(100 * (found == labels).double().mean().item())
    assert top1[1] > top1[0] - 6
