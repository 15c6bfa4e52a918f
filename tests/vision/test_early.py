"""Early exits: each image is answered by the first model that is sure, within the FLOPs."""

from functools import partial

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract
from tokenformer_vit.models import TokenFormerViT
from tokenformer_vit.models.sizes import at_size
from tokenformer_vit.vision.early import choose_exits, predict_early


@pytest.fixture
def model():
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
    nested = TokenFormerViT(**shape, nested=(0.25, 0.5), num_classes=5).eval()
    torch.nn.init.normal_(nested.head.weight, std=0.5)
    return nested


@torch.no_grad()
def test_each_image_is_answered_by_the_first_model_that_is_sure(model):
    images, seen = torch.randn(40, 3, 16, 16), []

    def classify(size, x):
        seen.append(len(x))
        with at_size(model, size):
            return model(x)

    sizes = [partial(classify, size) for size in model.sizes]
    alone = torch.stack([extract(model, size)(images) for size in model.sizes])  # (M, N, K)
    confidence = alone.softmax(-1).amax(-1)
    threshold = confidence.median().item()
    scores, exits = predict_early(images, sizes, threshold)
    expected = [next((i for i in (0, 1) if column[i] >= threshold), 2) for column in confidence.T]
    assert exits.tolist() == expected
    assert len(set(expected)) > 1
    torch.testing.assert_close(scores, alone[exits, torch.arange(40)])
    assert seen == [n for n in (40, *(sum(e > i for e in expected) for i in (0, 1))) if n]
    assert model.blocks[0].mlp.size is None
    assert predict_early(images, sizes, 0.0)[1].eq(0).all()
    assert predict_early(images, sizes, 1.1)[1].eq(2).all()


@pytest.mark.parametrize("limit", [1.0, 1.7, 2.0, 3.0, 7.0])
def test_the_choice_is_within_its_limit_and_not_worse_than_one_model(limit):
    labels = torch.randint(6, (300,))
    scores = torch.randn(3, 300, 6)
    for model, right in enumerate((2.0, 3.0, 4.0)):
        scores[model, torch.arange(300), labels] += right
    flops = [1, 2, 4]
    chosen, threshold = choose_exits(scores, labels, flops, limit)
    models = [lambda index, m=m: scores[m, index] for m in chosen]
    answers, number = predict_early(torch.arange(300), models, threshold)
    spent = torch.tensor([flops[m] for m in chosen]).cumsum(0)[number].double().mean()
    assert spent <= limit
    right = (scores.argmax(-1) == labels).sum(-1)
    assert (answers.argmax(-1) == labels).sum() >= max(
        right[m] for m in range(3) if flops[m] <= limit
    )
    if limit == 7:  # all may be used, and each adds something
        assert (answers.argmax(-1) == labels).sum() >= right[2]


def test_a_limit_below_the_smallest_model():
    with pytest.raises(InputError, match=r"limit of 9 FLOPs is below the 10"):
        choose_exits(torch.randn(2, 4, 3), torch.zeros(4), [10, 20], 9)
