import pytest
import torch

from tokenformer_vit.layers import BlockLayerNorm, BlockRMSNorm
from tokenformer_vit.layers.norm import NORMS, block_norm

NAMES = {"none": set(), "bias": {"bias"}, "weight+bias": {"weight", "bias"}}


@pytest.mark.parametrize("affine", NAMES)
def test_is_layer_norm(affine):
    norm = BlockLayerNorm(48, affine, eps=1e-3).double()
    assert {name for name, _ in norm.named_parameters()} == NAMES[affine]
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = 5 * torch.randn(2, 7, 48, dtype=torch.float64) + 3
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    if "weight" in NAMES[affine]:
        expected = expected * norm.weight
    if "bias" in NAMES[affine]:
        expected = expected + norm.bias
    torch.testing.assert_close(norm(x), expected)


def test_rms_divides_by_the_root_of_the_mean_square():
    norm = BlockRMSNorm(48, eps=1e-3)
    assert not norm.state_dict()
    x = 5 * torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=True) + 3
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)
    large = (torch.randn(4, 48) + 300).to(torch.float16)  # squares above the largest float16
    assert norm(large).dtype == torch.float16
    assert (norm(large) - 1).abs().max() < 0.1


def test_a_block_names_its_norm():
    assert [type(block_norm(norm, 48)) for norm in NORMS] == (
        3 * [BlockLayerNorm] + 2 * [BlockRMSNorm]
    )
    assert block_norm("rms", 48, 0.5).eps == block_norm("bias", 48, 0.5).eps == 0.5
    with pytest.raises(ValueError, match=r"bias, rms, rms\+weight, but got 'rmsnorm'"):
        block_norm("rmsnorm", 48)


@pytest.mark.parametrize("norm", NORMS)
def test_autocast_casts_once_for_all_layers_after_the_norm(norm):
    x = torch.randn(2, 5, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert block_norm(norm, 48)(x).dtype == torch.bfloat16
