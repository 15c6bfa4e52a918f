"""What is timed is what the names say, and every figure is what it is called."""

import pytest
import torch
from torch import nn

from tokenformer_vit.benchmarking import measures, reports
from tokenformer_vit.benchmarking.benchmark import (
    IMPLEMENTATIONS,
    MATCHED,
    PRECISIONS,
    Group,
    Images,
    Language,
    Run,
    Variant,
    build,
    measure_group,
)
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import LMConfig

CPU = torch.device("cpu")
IMAGES = Images("tokenformer_tiny", "vit_tiny_patch16_224", 32, 1)
EAGER = [Variant(name, False) for name in IMPLEMENTATIONS]


@pytest.fixture
def language():
    """Small language models; sequences have 12 tokens, of which 6 are decoded."""
    lm = pytest.importorskip("tokenformer_vit.language", exc_type=ImportError)
    shape = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
    return Language(
        lambda: lm.TokenFormerForCausalLM(lm.TokenFormerConfig(**shape, rotary_share=0.5)),
        lambda: lm.matched_transformer(LMConfig(**shape, rotary_share=0.5)),
        vocab_size=61,
        num_tokens=12,
    )


def test_the_matched_vit_costs_as_much_and_has_random_weights():
    subject = Images("tokenformer_cifar10_micro", MATCHED, 32, 2)
    (ours, flops), (theirs, others) = (subject.costs(baseline) for baseline in (False, True))
    assert theirs == pytest.approx(ours, rel=0.01)
    assert others["train"] == pytest.approx(flops["train"], rel=0.01)
    vit, same, other = (build(subject, "baseline", *seed) for seed in ((), (), (1,)))
    assert type(vit).__name__ == "VisionTransformer"
    assert vit(torch.randn(1, 3, 32, 32)).std() > 0
    assert torch.equal(vit.head.weight, same.head.weight)
    assert not torch.equal(vit.cls_token, other.cls_token)


def test_released_computes_what_ours_does():
    ours, released = (build(IMAGES._replace(depth=2), name) for name in ("auto", "released"))
    for layer in ours.modules():
        if isinstance(layer, Pattention):
            layer.eps = 0.0
            layer.tau = torch.tensor(layer.num_param_tokens, dtype=torch.float64).sqrt()
    assert not any(isinstance(layer, Pattention) for layer in released.modules())
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    features, gradients = [], []
    for model in (ours.double(), released.double()):
        tokens = model.forward_features(images)
        tokens.square().sum().backward()
        features.append(tokens)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*features, rtol=1e-11, atol=1e-12)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        if gradient is not None:  # the head has no part in the features
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_of_all_variants_is_by_products_in_bfloat16_on_a_cpu(precision):
    for variant in EAGER:
        run = Run(IMAGES, CPU, Group("train", precision, 2), variant)
        assert {block.attn.fused_attn for block in run.model.blocks} == {precision == "float32"}
        before = run.model.head.weight.clone()
        run.step()
        assert not torch.equal(run.model.head.weight, before)
        assert run.model.head.weight.grad is None


def test_saved_activations_of_a_small_network():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(5, 8)
    whole = torch.randn(7, 20)  # of which the loss needs a part, and so keeps all
    float32 = measures.saved_bytes(lambda: (model(x) * whole[:5, :4]).sum(), model)
    assert float32 == 4 * (5 * 8 + 5 * 16 + 7 * 20)  # input, hidden layer after ReLU, factor
    with torch.autocast("cpu", torch.bfloat16):
        bfloat16 = measures.saved_bytes(lambda: model(x).sum(), model)
    assert bfloat16 == 2 * (5 * 8 + 5 * 16)  # and no copy of a weight


def test_rounds_rotate_and_every_timed_call_follows_its_own():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = measures.measure_rounds(calls, 4, CPU)
    assert "".join(called) == "aabbccbbccaaccaabbaabbcc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_what_does_not_fit_drops_out(monkeypatch):
    step = Run.step

    def failing_step(run):
        if not any(isinstance(module, Pattention) for module in run.model.modules()):
            raise torch.OutOfMemoryError
        step(run)

    monkeypatch.setattr(Run, "step", failing_step)
    monkeypatch.setattr(measures, "matmul_rate", lambda device, dtype: 2e11)
    group = measure_group(IMAGES, CPU, Group("train", "bfloat16", 1), EAGER, 1)
    reports.add_figures(group, reports.new_record(IMAGES, IMAGES._asdict(), "cpu"))
    rows = {row["variant"]: row for row in group["variants"]}
    assert rows["released eager"]["failed"] == "out of memory"  # it has no Pattention of ours
    assert "seconds" not in rows["baseline eager"]
    assert rows["auto eager"]["images_per_s"] > 0
    assert "out of memory" in reports.table(group, "image")


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", ["baseline", "auto"])
@pytest.mark.parametrize("mode", Language.modes)
def test_flops_of_language(name, mode, language):
    group = Group(mode, "float32", 3)
    run = Run(language, CPU, group, Variant(name, False))
    batch = next(run.batches)
    with torch.set_grad_enabled(mode == "train"):
        if mode == "train":
            counted = measures.counted_flops(lambda: run.compute(*batch).backward())
        else:
            run.compute(*batch)  # makes the cache of decode
            counted = measures.counted_flops(lambda: run.compute(*batch))
    parameters, flops = language.costs(name == "baseline")
    # To a whole number for each token.
    assert flops[mode] == pytest.approx(counted["Global"] / language.items(group), abs=1)
    assert parameters == sum(p.numel() for p in run.model.parameters())


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@torch.no_grad()
def test_what_is_timed_is_the_language_model(name, language):
    results = []
    for mode in Language.modes:
        run = Run(language, CPU, Group(mode, "float32", 3), Variant(name, False))
        tokens, targets = next(run.batches)
        results.append(run.compute(tokens, targets))
        logits = run.model(tokens, use_cache=False).logits
        if mode == "train":
            expected = nn.functional.cross_entropy(logits.transpose(1, 2), targets)
        elif mode == "prefill":
            expected = logits[:, -1:]
        else:
            row, expected = tokens[:, :7], logits  # half of the sequence, and the next token
            for _ in range(language.decoded):
                expected = run.model(row, use_cache=False).logits[:, -1:]
                row = torch.cat((row, expected.argmax(dim=-1)), dim=1)
            assert torch.equal(run.compute(tokens, targets), results[-1])
        torch.testing.assert_close(results[-1], expected, rtol=1e-4, atol=1e-5)


def test_all_start_with_the_same_weights(language):
    models = [build(language, name, 7) for name in IMPLEMENTATIONS[1:]]
    for one, *others in zip(*(model.parameters() for model in models), strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize(("mode", "precision"), zip(Language.modes, PRECISIONS, strict=True))
def test_a_group_of_language(mode, precision, language):
    entry = measure_group(language, CPU, Group(mode, precision, 3), EAGER, 2)
    assert entry["items"] == (3 * 6 if mode == "decode" else 3 * 12)
    for row in entry["variants"]:
        assert len(row["seconds"]) == 2
        assert (row["saved_mb_per_token"] is None) == (mode != "train")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", ["train", "infer", "prefill"])
def test_all_variants_compiled(mode, precision, language):
    subject = language if mode == "prefill" else IMAGES
    compared = [Variant(name, compiled) for name in IMPLEMENTATIONS for compiled in (False, True)]
    entry = measure_group(subject, CPU, Group(mode, precision, 2), compared, 3)
    assert [row["variant"] for row in entry["variants"]] == list(map(str, compared))
    assert all(min(row["seconds"]) > 0 for row in entry["variants"])
    if mode == "train":
        saved = {row["variant"]: row["saved_mb_per_image"] for row in entry["variants"]}
        assert saved["auto compiled"] == pytest.approx(saved["auto eager"], rel=0.05)
