"""What is timed is what the names say."""

from functools import partial

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy

from tokenformer_vit.benchmarking.benchmark import Run, measure, measure_rounds
from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.benchmarking.matched import matched_vit


def run(training=True, amp=False, compiled=False):
    create = partial(timm.create_model, "tokenformer_tiny", img_size=32, depth=1, num_classes=5)
    batch = torch.randn(2, 3, 32, 32), torch.tensor([3, 1])
    return Run(
        create, compiled, lambda model, x, y: cross_entropy(model(x), y), [batch], training, amp
    )


def test_the_matched_vit_costs_as_much_and_has_random_weights():
    model = timm.create_model("tokenformer_cifar10_micro", depth=2)
    vit, _ = matched_vit(model)
    ours, theirs = (total(model_costs(each)) for each in (model, vit))
    assert theirs.parameters == pytest.approx(ours.parameters, rel=0.01)
    assert theirs.forward_flops == pytest.approx(ours.forward_flops, rel=0.01)
    assert vit(torch.randn(1, 3, 32, 32)).std() > 0


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_trains_with_attention_by_products_in_bfloat16_on_a_cpu(amp):
    one = run(amp=amp)
    assert one.model.blocks[0].attn.fused_attn == (not amp)
    before = one.model.head.weight.clone()
    one.step()
    assert not torch.equal(one.model.head.weight, before)
    assert one.model.head.weight.grad is None
    assert not run(training=False, amp=amp).forward().requires_grad


def test_rounds_rotate_and_every_timed_call_follows_its_own():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = measure_rounds(calls, 4, torch.device("cpu"))
    assert "".join(called) == "aabbccbbccaaccaabbaabbcc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_compiled_runs_are_measured_beside_eager_ones(training):
    rows = measure({str(way): run(training, True, way) for way in (False, True)}, 3)
    assert [len(row["seconds"]) for row in rows.values()] == [3, 3]
