"""tokenformer-vit lm-eval: the harness's own command knows our models."""

import json
import sys

import pytest

pytest.importorskip("transformers", reason="pip install '.[language]'")

from tokenformer_vit import cli
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    save_language_model,
)

TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{[a, b]}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow  # the harness looks through thousands of its own tasks
def test_a_task_of_the_harness_is_run_on_our_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")
    from datasets import config as cache
    from lm_eval import evaluator

    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # it takes seconds
    monkeypatch.setattr(cache, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = TokenFormerConfig(
        vocab_size=257, context_length=32, embed_dim=32, depth=1, num_heads=2, rotary_share=0.5
    )
    save_language_model(TokenFormerForCausalLM(config), tmp_path / "run", byte_tokenizer())
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"question": "a or b?", "a": "a", "b": "b"}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(items=items))
    arguments = ["--model", "hf", "--model_args", f"pretrained={tmp_path / 'run'}"]
    arguments += ["--tasks", str(tmp_path / "task.yaml"), "--device", "cpu"]
    cli.main(["lm-eval", "run", *arguments])
    assert "|letters|" in capsys.readouterr().out


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "tokenformer_vit.cli.harness", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["lm-eval", "ls", "tasks"])
    assert "'.[evaluation]' for language models" in capsys.readouterr().err
