import pytest
import torch

from tokenformer_vit.layers.drop_path import DropPath


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_samples_at_its_rate_and_keeps_the_mean(dtype):
    x = torch.ones(20_000, 2, 3, dtype=dtype)
    out = DropPath(0.25)(x)
    kept = out[:, 0, 0] != 0
    assert kept.float().mean() == pytest.approx(0.75, abs=0.02)
    assert (out[kept] == torch.tensor(1 / 0.75, dtype=dtype)).all()
    assert (out[~kept] == 0).all()
    assert out.dtype == dtype
