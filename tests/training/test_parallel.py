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


def _ask(rank, store, answers):
    init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    agreement = Agreement()
    asked = [(False, rank == 0), (rank == 1, False), (False, False), (False, False)]
    answers[rank] = [agreement.any(*each) for each in asked]
    destroy_process_group()


def test_two_processes_learn_at_the_same_call_what_one_noticed(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    with context.Manager() as manager:
        answers = manager.dict()
        processes = [
            context.Process(target=_ask, args=(rank, f"file://{tmp_path}/store", answers))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        expected = [[False, False], [False, True], [True, False], [False, False]]
        assert dict(answers) == {0: expected, 1: expected}
