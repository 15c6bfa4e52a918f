"""The timed steps of language models compute what they say, with the FLOPs that are counted."""

import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from tokenformer_vit.benchmarking.benchmark import (
    PRECISIONS,
    Group,
    Language,
    Run,
    Variant,
    build,
    measure_group,
)
from tokenformer_vit.benchmarking.measures import counted_flops
from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM, matched_transformer
from tokenformer_vit.models import LMConfig

SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
CONFIG = LMConfig(**SHAPE, rotary_share=0.5)
SUBJECT = Language(
    lambda: TokenFormerForCausalLM(TokenFormerConfig(**SHAPE, rotary_share=0.5)),
    lambda: matched_transformer(CONFIG),
    vocab_size=61,
    num_tokens=12,
)
IMPLEMENTATIONS = ("baseline", "released", "reference", "auto")


def bound(implementation, mode):
    """Return a model, the tokens and targets of its first step, and the timed function."""
    run = Run(
        SUBJECT, torch.device("cpu"), Group(mode, "float32", 3), Variant(implementation, False)
    )
    tokens, targets = next(run.batches)
    return run.model, tokens, targets, lambda: run.compute(tokens, targets)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("implementation", ["baseline", "reference"])
@pytest.mark.parametrize("mode", SUBJECT.modes)
def test_flops_are_what_pytorch_counts(implementation, mode):
    model, _, _, call = bound(implementation, mode)
    if mode == "decode":
        call()  # makes the cache
    with torch.set_grad_enabled(mode == "train"):
        step = (lambda: call().backward()) if mode == "train" else call
        counted = counted_flops(step)["Global"]
    parameters, flops = SUBJECT.costs(implementation == "baseline")
    # To a whole number for each token.
    assert flops[mode] == pytest.approx(counted / SUBJECT.items(Group(mode, "float32", 3)), abs=1)
    assert parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_what_is_timed_is_the_model(implementation):
    model, tokens, targets, train = bound(implementation, "train")
    logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets)
    torch.testing.assert_close(train(), loss)
    model, tokens, _, prefill = bound(implementation, "prefill")
    last = model(tokens, use_cache=False).logits[:, -1:]
    torch.testing.assert_close(prefill(), last)
    model, tokens, _, decode = bound(implementation, "decode")
    row = tokens[:, :7]  # half of the sequence, and the token that follows
    for _ in range(6):
        last = model(row, use_cache=False).logits[:, -1:]
        row = torch.cat((row, last.argmax(dim=-1)), dim=1)
    first, again = decode(), decode()
    torch.testing.assert_close(first, last, rtol=1e-4, atol=1e-5)
    assert torch.equal(first, again)


def test_all_start_with_the_same_weights():
    models = [build(SUBJECT, name, 7) for name in IMPLEMENTATIONS[1:]]
    for one, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        *((mode, False) for mode in SUBJECT.modes),
        *(pytest.param(mode, True, marks=pytest.mark.slow) for mode in ("train", "prefill")),
    ],
)
def test_a_group(mode, compiled):
    variants = [Variant(name, compiled) for name in IMPLEMENTATIONS]
    precision = dict(zip(SUBJECT.modes, PRECISIONS, strict=True))[mode]
    entry = measure_group(SUBJECT, torch.device("cpu"), Group(mode, precision, 3), variants, 2)
    assert entry["items"] == (3 * 6 if mode == "decode" else 3 * 12)
    assert [row["variant"] for row in entry["variants"]] == list(map(str, variants))
    for row in entry["variants"]:
        assert len(row["seconds"]) == 2
        assert (row["saved_mb_per_token"] is None) == (mode != "train")
