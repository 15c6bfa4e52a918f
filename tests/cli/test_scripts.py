"""timm's scripts and lm-evaluation-harness run as by themselves, and know our models."""

import json
import subprocess
import sys

import pytest

from tokenformer_vit import cli

SCRIPT = """
import json, sys
import beside
import timm
model = timm.create_model("tokenformer_tiny", depth=1, img_size=32, num_classes=3)
print(json.dumps([__name__, sys.argv, beside.VALUE, model.num_classes]))
sys.exit(int(sys.argv[-1]))
"""
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


@pytest.mark.slow
def test_a_script_sees_our_models_its_arguments_and_its_neighbours(tmp_path):
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("VALUE = 7\n")
    script.write_text(SCRIPT)
    words = ["data dir", "--model", "x", "--help", "3"]  # --help is the script's own
    line = [sys.executable, "-m", "tokenformer_vit", "timm", script, *words]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == ["__main__", [str(script), *words], 7, 3]


def test_an_error_of_the_script_has_its_traceback(tmp_path, command, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script's folder comes first in it
    (tmp_path / "script.py").write_text("raise RuntimeError('what')\n")
    with pytest.raises(RuntimeError, match="what"):
        command("timm_script", tmp_path / "script.py")


@pytest.mark.slow  # the harness looks through thousands of its own tasks
def test_a_task_of_the_harness_is_run_on_our_model(tmp_path, monkeypatch, capsys, arrow_cache):
    evaluator = pytest.importorskip("lm_eval.evaluator", reason="pip install '.[evaluation]'")
    from tokenformer_vit import language

    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # it takes seconds
    shape = {"vocab_size": 257, "context_length": 32, "embed_dim": 32, "depth": 1, "num_heads": 2}
    model = language.TokenFormerForCausalLM(language.TokenFormerConfig(**shape))
    language.save_language_model(model, tmp_path / "run", language.byte_tokenizer())
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"question": "a or b?", "a": "a", "b": "b"}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(items=items))
    words = ["--model", "hf", "--model_args", f"pretrained={tmp_path / 'run'}", "--device", "cpu"]
    cli.main(["lm-eval", "run", *words, "--tasks", str(tmp_path / "task.yaml")])
    assert "|letters|" in capsys.readouterr().out
