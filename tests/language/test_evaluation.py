"""Perplexity: every token but the first is predicted once, from as much as the context allows."""

import math

import numpy as np
import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM
from tokenformer_vit.language.evaluation import measure_text, text_values

CONTEXT = 12


@pytest.fixture
def model():
    shape = {"vocab_size": 61, "context_length": CONTEXT, "embed_dim": 32, "depth": 1}
    config = TokenFormerConfig(**shape, num_heads=2, rotary_share=0.5)
    return TokenFormerForCausalLM(config).eval()


@pytest.mark.parametrize("stride", [None, 1, 5])
@pytest.mark.parametrize("length", [2, 12, 13, 14, 50])
@torch.no_grad()
def test_the_sum_is_that_of_single_predictions(model, stride, length):
    tokens = torch.randint(61, (length,))
    expected, moved = 0.0, stride or CONTEXT
    for place in range(1, length):  # from all tokens before it that fit
        begin = moved * math.ceil(max(place - CONTEXT, 0) / moved)
        log_p = model.double()(tokens[None, begin:place]).logits[0, -1].log_softmax(-1)
        expected -= log_p[tokens[place]].item()
    predicted, nats = measure_text(model.float(), tokens.numpy(), CONTEXT, stride, batch_size=3)
    assert predicted == length - 1
    assert nats == pytest.approx(expected, rel=1e-5)
    _, rounded = measure_text(model, tokens.numpy(), CONTEXT, stride, amp=True)
    assert rounded == pytest.approx(expected, rel=0.02)


def test_what_has_no_loss_is_refused(model):
    with pytest.raises(InputError, match="text has 1 tokens; give a text of at least 2"):
        measure_text(model, np.zeros(1, int), CONTEXT)
    with torch.no_grad():
        model.model.norm.bias[3] = torch.nan
    with pytest.raises(InputError, match="loss on text is nan: leave out --amp"):
        measure_text(model, np.zeros(5, int), CONTEXT)
    assert text_values(1, 1e6)["perplexity"] == math.inf
