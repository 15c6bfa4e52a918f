"""Apart from the forward and backward pass, an optimiser step takes few operator calls."""

import copy
from collections import Counter

import pytest
from mmengine.optim import OptimWrapper
from mmpretrain.models import ImageClassifier
from torch.utils._python_dispatch import TorchDispatchMode

from tokenformer_vit.training import ResumableEpochLoop

MODEL = """
model = dict(
    backbone=dict(model_name="tokenformer_base_matched", embed_dim=12, depth=12, num_heads=2),
    head=dict(in_channels=12),
)
default_hooks = dict(logger=dict(interval=100))
"""


class Calls(TorchDispatchMode):
    """Count operator calls; the calls within a function can be left out."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += not self.paused
        return func(*args, **(kwargs or {}))

    def leaving_out(self, function):
        def called(*args, **kwargs):
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return called


@pytest.fixture
def calls(train, tmp_path, monkeypatch):
    """Count the mean number of operator calls of an iteration in a run."""

    def count(*options):
        path = tmp_path / "wide.py"
        path.write_text(f"_base_ = {train.arguments[0]!r}\n{MODEL}")
        own = copy.copy(train)
        own.arguments = [str(path), *train.arguments[1:]]
        steps, run_iter = [], ResumableEpochLoop.run_iter

        def counted(loop, batch_idx, data_batch):
            with calls:
                run_iter(loop, batch_idx, data_batch)
            steps.append(calls.counts.copy())
            calls.counts.clear()

        calls = Calls()
        monkeypatch.setattr(ResumableEpochLoop, "run_iter", counted)
        monkeypatch.setattr(ImageClassifier, "forward", calls.leaving_out(ImageClassifier.forward))
        monkeypatch.setattr(OptimWrapper, "backward", calls.leaving_out(OptimWrapper.backward))
        own(tmp_path / "run", "--cfg-options", "train_cfg.max_epochs=2", *options)
        return steps[2]  # the first copies weights into their average

    return count


def test_a_step_is_few_operator_calls(calls):
    counts = calls()
    assert counts["aten._foreach_lerp_.ScalarList"] + counts["aten._foreach_lerp_.Scalar"] > 0
    assert counts.total() <= 400, counts.most_common(12)
