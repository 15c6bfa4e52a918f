"""Budgets cost what they may and lose little; tokens read only their strongest pairs."""

import copy
import json
import statistics
from pathlib import Path

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import measure_usage, pattention_layers, prune
from tokenformer_vit.models import LMConfig, TokenFormerLM, TokenFormerViT
from tokenformer_vit.ops import THETAS
from tokenformer_vit.vision.compression import (
    candidates,
    check_apart,
    choose_counts,
)

COUNTS = {"num_qkv_param_tokens": 32, "num_proj_param_tokens": 48, "num_ffn_param_tokens": 64}
COSTS = {"num_qkv_param_tokens": 3, "num_proj_param_tokens": 1, "num_ffn_param_tokens": 1}
WHOLE = 3 * sum(COSTS[name] * COUNTS[name] for name in COUNTS)


def build(**changes):
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return TokenFormerViT(**{**shape, **COUNTS, **changes}, num_classes=4).eval()


def linear(numbers):
    """A loss by which a pair of the second block is worth most, and one of the first least."""
    return -sum((1, 10, 3)[i] * n for each in numbers.values() for i, n in enumerate(each))


def test_each_share_is_used_up_to_one_pair():
    shares = (1.0, 0.99, 0.5, 0.3, 0.07)
    for share, numbers in zip(shares, choose_counts(build(), shares, linear), strict=True):
        cost = sum(COSTS[name] * sum(each) for name, each in numbers.items())
        assert 0 <= share * WHOLE - cost < 3
        assert all(1 <= n <= COUNTS[name] for name, each in numbers.items() for n in each)


def test_the_loss_decides_and_kinds_that_are_not_named_stay():
    asked = []

    def loss(numbers):
        asked.append(numbers)
        return linear(numbers)

    half, least = choose_counts(build(), [0.5, 1e-6], loss, kinds=("ffn",))
    assert half == {"num_ffn_param_tokens": [1, 64, 31]}
    assert least == {"num_ffn_param_tokens": [1, 1, 1]}  # every layer keeps a pair
    assert all(each.keys() == half.keys() for each in asked)
    assert len(asked) < 3 * 16 * 2  # the others are not measured at every step


def test_the_numbers_fit_prune_and_a_new_model():
    (numbers,) = choose_counts(build(), [0.4], linear)
    model, x = build(), torch.randn(4, 3, 16, 16)
    smaller = prune(copy.deepcopy(model), measure_usage(model, [x]), **numbers)
    build(**numbers).load_state_dict(smaller.state_dict())
    config = LMConfig(vocab_size=9, embed_dim=16, depth=3, num_heads=2, rotary_share=0.5, **COUNTS)
    assert choose_counts(TokenFormerLM(config), [0.4], linear) == [numbers]


@torch.no_grad()
def test_a_budget_is_chosen_by_the_loss_of_the_pruned_model():
    model, x = build(), torch.randn(64, 3, 16, 16)
    torch.nn.init.normal_(model.head.weight)
    labels = model(x).argmax(dim=-1)
    usage = measure_usage(model, [x])

    def loss(numbers):
        smaller = prune(copy.deepcopy(model), usage, **numbers)
        return torch.nn.functional.cross_entropy(smaller(x), labels).item()

    (numbers,) = choose_counts(model, [0.5], loss, ["ffn"])
    made = candidates(model, ["prune", "budget"], [0.5], usage, [(x, labels)], ["ffn"])
    dense, pruned, chosen = made
    assert [each.method for each in made] == ["dense", "prune", "budget"]
    torch.testing.assert_close(chosen.scores(x), prune(copy.deepcopy(model), usage, **numbers)(x))
    assert chosen.flops() <= pruned.flops() < dense.flops()


@pytest.mark.parametrize("theta", THETAS)
@torch.no_grad()
def test_a_token_reads_its_strongest_pairs(theta):
    model, x = build(theta=theta), torch.randn(5, 3, 16, 16)
    whole = model(x)
    (dense, half) = candidates(model, ["top-k"], [0.5])
    layer, seen = pattention_layers(model)["blocks.1.mlp"], []
    with half.reading(), layer.register_forward_hook(lambda _, *both: seen.append(both)):
        assert not torch.allclose(model(x), whole)
    (((tokens,), output),) = seen
    weights = layer.double().weights(tokens.double())
    limit = weights.abs().topk(32).values[..., -1:]
    expected = torch.where(weights.abs() >= limit, weights, 0) @ layer.value_param_tokens
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()
    layer.float()
    assert torch.equal(model(x), whole)
    assert half.entry()["pairs"] == {"qkv": 16, "proj": 24, "ffn": 32}
    # Of 5 tokens, 3 blocks and 16 channels: all keys, and half of the values. To multiply linear
    # tokens out is cheaper.
    most = 16 if theta == "linear" else 1000
    saved = sum(min(2 * pairs, most) - 1.5 * pairs for pairs in (32, 32, 32, 48, 64))
    assert dense.flops() - half.flops() == 2 * 5 * 3 * 16 * saved


@torch.no_grad()
def test_compiled_blocks_read_their_strongest_pairs():
    model, x = build(), torch.randn(2, 3, 16, 16)
    _, half = candidates(model, ["top-k"], [0.5])
    expected = half.scores(x)
    for block in model.blocks:
        block.compile(backend="eager")
    model(x)
    torch.testing.assert_close(half.scores(x), expected)


@pytest.mark.parametrize("folder", ["val", ".", "val/cat"])
def test_no_choice_by_the_images_of_the_accuracy(folder, tmp_path):
    with pytest.raises(InputError, match=r"overlap .* --measure-on"):
        check_apart(tmp_path / folder, tmp_path)
    check_apart(tmp_path / "train", tmp_path)
    check_apart(tmp_path, tmp_path / "other")


def test_the_gain_that_the_page_names_is_that_of_its_record():
    folder = Path(__file__).resolve().parents[2] / "tokenformer_vit/growth"
    record = json.loads((folder / "results/compression_budgets.json").read_text())
    top1 = {(point["method"], point["keep"]): point["top1"] for point in record["points"]}
    gain = [a - b for a, b in zip(top1["budget", 0.5], top1["prune", 0.5], strict=True)]
    interval = 2.776 * statistics.stdev(gain) / 5**0.5  # Student's t, four degrees of freedom
    page = (folder / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"The gain is {statistics.mean(gain):.1f} ± {interval:.1f} points" in page
