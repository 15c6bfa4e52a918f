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


def test_a_rotary_transformer_has_the_same_flops():
    rotary = SUBJECT._replace(baseline=lambda: matched_transformer(CONFIG, "rotary"))
    assert rotary.create(True).config.model_type == "gpt_neox"
    (parameters, flops), (others, same) = rotary.costs(True), SUBJECT.costs(True)
    assert flops == same
    assert parameters == others - 40 * 32  # no learned positions


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


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@torch.no_grad()
def test_decoding_goes_on_from_the_same_tokens_each_time(implementation):
    model, tokens, _, decode = bound(implementation, "decode")
    assert SUBJECT.decoded == 6
    row = tokens[:, :7]  # half of the sequence, and the token that follows
    logits = torch.empty(0)
    for _ in range(6):
        logits = model(row, use_cache=False).logits[:, -1:]
        row = torch.cat((row, logits.argmax(dim=-1)), dim=1)
    first, again = decode(), decode()
    torch.testing.assert_close(first, logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(first, again)


def test_all_start_with_the_same_weights():
    released, reference, auto = (build(SUBJECT, name, 7) for name in IMPLEMENTATIONS[1:])
    weights = [list(model.parameters()) for model in (reference, released, auto)]
    for one, other, third in zip(*weights, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)
    assert {m.backend for m in auto.modules() if hasattr(m, "backend")} == {"auto"}


@pytest.mark.parametrize(("mode", "precision"), zip(SUBJECT.modes, PRECISIONS, strict=True))
def test_a_group(mode, precision):
    variants = [Variant(name, False) for name in IMPLEMENTATIONS]
    entry = measure_group(SUBJECT, torch.device("cpu"), Group(mode, precision, 3), variants, 2)
    assert entry["items"] == (3 * 6 if mode == "decode" else 3 * 12)
    for row in entry["variants"]:
        assert len(row["seconds"]) == 2
        assert (row["saved_mb_per_token"] is None) == (mode != "train")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_a_group_that_is_compiled(mode):
    variants = [Variant(name, True) for name in IMPLEMENTATIONS]
    entry = measure_group(SUBJECT, torch.device("cpu"), Group(mode, "float32", 3), variants, 1)
    assert [row["variant"] for row in entry["variants"]] == list(map(str, variants))
