"""Language models train in mmengine's runner, as image classifiers do."""

import itertools
import json
import math
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="language models need the extra [language]")
pytest.importorskip("datasets", reason="language models need the extra [language]")

from tokenformer_vit.benchmarking.costs import training_flops
from tokenformer_vit.errors import InputError
from tokenformer_vit.language import byte_tokenizer, load_tokenizer
from tokenformer_vit.language.generation import load_language_model, save_language_model
from tokenformer_vit.training.config import check_config, choose_checkpoint, load_config
from tokenformer_vit.training.language import AnswerAccuracy, CausalLM, Perplexity, TokenDataset
from tokenformer_vit.training.runner import TrainingRunner

from .conftest import losses, scalars

LENGTH = 16
SIZES = {"vocab_size": 264, "context_length": LENGTH, "embed_dim": 16, "depth": 2, "num_heads": 2}
ROTARY = {"positions": "rotary", "rotary_share": 0.5}
PAIRS = {"num_qkv_param_tokens": 16, "num_proj_param_tokens": 16, "num_ffn_param_tokens": 32}
CONFIG = f"""
_base_ = "tokenformer_vit::_base_/language_small.py"
model = dict(config=dict(_delete_=True, rotary_share=0.5, **{ {**SIZES, **PAIRS}!r}))
train_dataloader = dict(batch_size=4, num_workers=0)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-3, by_epoch=False, end=2),
    dict(type="CosineAnnealingLR", eta_min=2e-4, by_epoch=False, begin=2),
]
train_cfg = dict(max_iters=12, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=12))
log_processor = dict(window_size=1)
auto_scale_lr = dict(base_batch_size=4)
"""
NUMBERS = itertools.count()
NEW = {**SIZES, **PAIRS, "rotary_share": 0.5}


def write_text(folder: Path, letters: str, generator: np.random.Generator) -> Path:
    """Write 40 rows to train on and 7 to validate on, of random letters."""
    folder.mkdir(parents=True)
    splits = {}
    for split, rows in (("train", 40), ("val", 7)):
        text = generator.choice(list(letters.encode()), rows * LENGTH + 1)
        text.astype(np.uint16).tofile(folder / f"{split}.bin")
        splits[split] = {"tokens": len(text), "documents": 1, "bytes": len(text)}
    meta = {"context_length": LENGTH, "vocab_size": 258, "end": 256, "dtype": "uint16"}
    (folder / "meta.json").write_text(json.dumps({**meta, "splits": splits}))
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path, generator):
    return {
        name: str(write_text(tmp_path / "texts" / name, letters, generator))
        for name, letters in {"abc": "aab c", "xyz": "xyyz!"}.items()
    }


def test_rows_overlap_by_one_and_know_their_text(texts):
    rows, alone = TokenDataset(list(texts.values()), "val"), TokenDataset(texts["xyz"], "val")
    assert (len(rows), len(alone)) == (14, 7)
    assert [row["source"] for row in rows] == [0] * 7 + [1] * 7
    tokens = np.fromfile(Path(texts["xyz"]) / "val.bin", np.uint16)
    for each in (alone, pickle.loads(pickle.dumps(alone))):  # as a worker gets it
        inputs = np.stack([row["inputs"] for row in each])
        np.testing.assert_array_equal(inputs[:, 1:].ravel(), tokens[1:])
        np.testing.assert_array_equal(inputs[1:, 0], inputs[:-1, -1])
    assert torch.equal(rows[8]["inputs"], alone[1]["inputs"])
    assert len(pickle.dumps(alone)) < 1000


@pytest.fixture
def run(texts, tmp_path):
    def start(work_dir, resume=None, **options):
        (tmp_path / "small_lm.py").write_text(CONFIG)
        where = {"data_root": texts["abc"], "work_dir": str(work_dir)}
        cfg = load_config(tmp_path / "small_lm.py", **where)
        # mmengine keeps what it logs by this name, for the whole process
        cfg.experiment_name = f"language_{next(NUMBERS)}"
        cfg.log_level = "ERROR"
        cfg.merge_from_dict(options)
        check_config(cfg)
        choose_checkpoint(cfg, resume)
        runner = TrainingRunner.from_cfg(cfg)
        runner.train()
        return runner

    return start


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("kind", ["tokenformer", "gpt2", "gpt_neox"])
def test_a_run_ends_with_a_folder_for_transformers_and_a_record(kind, run, texts, tmp_path):
    options = {"optim_wrapper.type": "AutocastOptimWrapper"}
    if kind != "tokenformer":
        sizes = {**SIZES, **(ROTARY if kind == "gpt_neox" else {}), "hidden_features": 24}
        options["model.config"] = {**sizes, "_delete_": True}
        options["model.architecture"] = "transformer"
    run(tmp_path / "run", **options)
    model = load_language_model(tmp_path / "run")
    assert model.config.model_type == kind
    assert load_tokenizer(tmp_path / "run", model.config.vocab_size).decode([97]) == "a"
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    facts = ("iterations", "train_sequences", "sequences_per_step", "dtype")
    assert [record[name] for name in facts] == [12, 40, 4, "bfloat16 autocast"]
    assert {"transformers", "tokenizers"} <= record["versions"].keys()
    # What validation says of the last weights is what they say themselves.
    inputs = torch.stack([row["inputs"] for row in TokenDataset(texts["abc"], "val")])
    with torch.no_grad():
        log_p = model(input_ids=inputs[:, :-1]).logits.double().log_softmax(-1)
    losses = -log_p.gather(-1, inputs[:, 1:, None])
    assert record["perplexity"] == pytest.approx(losses.mean().exp().item(), abs=1e-3)
    assert record["flops"] == 12 * 4 * training_flops(model, LENGTH)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_goes_on_exactly(run, tmp_path):
    """In the first epoch, with growth, accumulation and workers."""
    grown = [{"iteration": 4, "num_ffn_param_tokens": 48}]
    grown += [{"iteration": 9, "num_qkv_param_tokens": 20}]
    hooks = [{"type": "CostHook"}, {"type": "GrowthHook", "schedule": grown}]
    options = {"default_hooks.checkpoint.interval": 5, "custom_hooks": hooks}
    options |= {"optim_wrapper.accumulative_counts": 2, "train_dataloader.num_workers": 1}
    options |= {"default_hooks.checkpoint.max_keep_ckpts": -1}
    whole = run(tmp_path / "whole", **options)
    cut = run(tmp_path / "cut", resume=str(tmp_path / "whole" / "iter_5.pth"), **options)
    found = losses(tmp_path / "cut"), losses(tmp_path / "whole")
    assert [*found[0]] == [*range(6, 13)]
    assert found[0].items() <= found[1].items()
    cut_at, whole_at = (scalars(tmp_path / name)[1] for name in ("cut", "whole"))
    for step in (8, 12):
        assert cut_at[step]["perplexity"] == whole_at[step]["perplexity"]
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert torch.equal(one, other)
    record, other = (
        json.loads((tmp_path / name / "record.json").read_text()) for name in ("cut", "whole")
    )
    assert (record["resumed_at_iteration"], record["flops"]) == (5, other["flops"])
    assert [growth["iteration"] for growth in record["growth"]] == [4, 9]


def test_perplexity_of_several_texts_is_that_of_their_tokens():
    metric = Perplexity()
    metric.dataset_meta = {"sources": ("en", "fr")}
    losses = torch.tensor([[1.0, 2.0], [4.0, 0.5], [0.25, 0.25]])
    rows = zip(losses, torch.tensor([0, 1, 1]), strict=True)
    metric.process(None, [{"losses": row, "source": source} for row, source in rows])
    wanted = {"perplexity": 8 / 6, "perplexity/en": 1.5, "perplexity/fr": 1.25}
    assert metric.evaluate(3) == pytest.approx({key: math.exp(x) for key, x in wanted.items()})


def test_an_answer_is_right_if_all_of_it_is():
    metric = AnswerAccuracy(start=9, end=0)
    # Of three whole answers one is right. Parts of answers do not count, nor what is outside.
    targets = torch.tensor([5, 0, 1, 9, 2, 3, 0, 9, 2, 0, 9, 7, 0, 9, 4])
    right = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    metric.process(None, [{"targets": targets, "right": right}])
    assert metric.evaluate(1) == {"answers/accuracy": pytest.approx(100 / 3), "answers/count": 3}
    metric.process(None, [{"targets": targets[:2], "right": right[:2]}])
    with pytest.raises(InputError, match=r"no row .* the tokens 9 and 0; leave AnswerAccuracy out"):
        metric.evaluate(1)


def test_training_goes_on_in_float32_from_weights_of_16_bits(tmp_path):
    save_language_model(CausalLM("tokenformer", NEW).model.bfloat16(), tmp_path / "half")
    started = CausalLM(checkpoint=str(tmp_path / "half"), growth={"num_ffn_param_tokens": 40})
    assert {parameter.dtype for parameter in started.parameters()} == {torch.float32}


@pytest.mark.parametrize("place", ["among val", "train and val", "the checkpoint"])
def test_tokenizers_of_one_name_and_size_that_differ_are_refused(run, texts, tmp_path, place):
    """Two tokenizers can have the same name and size if their training texts differ."""
    folder = shutil.copytree(texts["xyz"], tmp_path / "odd")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    entries = content["model"]["vocab"]
    entries["a"], entries["b"] = entries["b"], entries["a"]
    file.write_text(json.dumps(content))
    val = [texts["abc"], str(folder)] if place == "among val" else str(folder)
    options = {"val_dataloader.dataset.data_root": val}
    if place == "the checkpoint":
        model = CausalLM("tokenformer", NEW).model
        save_language_model(model, folder, load_tokenizer(folder))
        options = {"model.config": {"_delete_": True}, "model.checkpoint": str(folder)}
    with pytest.raises(InputError, match=r"differ: token 97 is '[ab]' .* --tokenizer"):
        run(tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.config.vocab_size": 100}, r"vocab_size of 258, .* is 100: set .*vocab_size=258"),
        ({"model.config.context_length": 8}, r"context_length of 16, .*set .*context_length=16"),
        ({"model.checkpoint": "nowhere"}, r"nowhere has its own sizes: set .*_delete_"),
        ({"train_dataloader.dataset.data_root": "nowhere"}, r"there is no folder nowhere"),
    ],
)
def test_what_does_not_fit_is_said(run, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        run(tmp_path / "run", **options)


def test_weights_of_another_theta_are_refused(run, tmp_path):
    run(tmp_path / "run")
    checkpoint = str(tmp_path / "run" / "iter_12.pth")
    for name, how in (("other", "load_from"), ("run", "resume")):
        with pytest.raises(InputError, match=r"theta is 'gelu_l1', .* trained with 'gelu_l2': set"):
            run(tmp_path / name, **{how: checkpoint, "model.config.theta": "gelu_l1"})
    run(tmp_path / "other", load_from=checkpoint, **{"model.config.theta": "gelu_l2"})


@pytest.mark.parametrize("distill", [False, True])
def test_a_nested_model_is_trained_and_measured_at_every_size(distill):
    config = {**SIZES, **PAIRS, "nested": (0.25, 0.5)}
    model = CausalLM("tokenformer", config, sandwich=True, distill=distill)
    inputs = torch.randint(0, 264, (8, LENGTH + 1))
    rows = model(inputs, mode="predict")
    metric, losses, teacher = Perplexity(), [], None
    metric.process(None, rows)
    found = metric.evaluate(8)
    for size in (1.0, 0.5, 0.25):  # all sizes are in each step
        model.sized.set_size(size)
        log_p = model(inputs).log_softmax(-1).flatten(0, 1)
        losses.append(F.nll_loss(log_p, inputs[:, 1:].flatten()))
        name = "perplexity" if size == 1 else f"perplexity_at_{size:g}"
        assert found[name] == pytest.approx(losses[-1].exp().item(), rel=1e-5)
        if distill and teacher is not None:
            distance = (teacher.exp() * (teacher - log_p)).sum(-1).mean()
            losses[-1] = (losses[-1] + distance) / 2
        teacher = log_p.detach()
    model.sized.set_size(None)
    torch.testing.assert_close(model(inputs, mode="loss")["loss"], torch.stack(losses).mean())
