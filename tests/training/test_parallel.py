"""Gradients travel between processes in the type, and by the means, that the config says."""

import pytest
import torch
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.distributed import HashStore, destroy_process_group, init_process_group

from tokenformer_vit.training.termination import Agreement


@pytest.fixture
def group():
    """A process group of this process alone."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.parametrize(
    ("compression", "dtype"),
    [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
@pytest.mark.parametrize("view", [False, True])
def test_gradients_are_rounded_to_the_type_in_which_they_travel(group, compression, dtype, view):
    model, images = nn.Linear(7, 3), torch.randn(5, 7)
    model(images).square().sum().backward()
    expected = [parameter.grad.to(dtype).float() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    wrapper = {
        "type": "CompressingDataParallel",
        "module": model,
        "compression": compression,
        "gradient_as_bucket_view": view,
        "static_graph": view,
        "device_ids": None,
    }
    parallel = MODEL_WRAPPERS.build(wrapper)
    parallel(images).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
        assert (parameter.grad._base is not None) == view


def test_one_process_learns_at_once_what_it_noticed(group):
    agreement = Agreement()
    assert agreement.any(False, True) == [False, True]
    assert agreement.any(False, False) == [False, False]


def test_two_processes_learn_at_the_same_call_what_one_noticed(in_two_processes):
    def ask(rank):
        agreement = Agreement()
        asked = [(False, rank == 0), (rank == 1, False), (False, False), (False, False)]
        return [agreement.any(*each) for each in asked]

    expected = [[False, False], [False, True], [True, False], [False, False]]
    assert in_two_processes(ask) == [expected, expected]
