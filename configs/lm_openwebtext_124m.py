# The smallest model of the paper's growth series, 12 × 768 with 576 / 2304 pairs, on OpenWebText:
# 300 billion tokens, as many as the Transformer of the comparison.
#
# Paper:     perplexity 16.41 on OpenWebText (arXiv:2410.23168, Figure 3)
# Data:      tokenformer-vit prepare-text --hub Skylion007/openwebtext data/openwebtext \
#                --tokenizer gpt2 --context-length 1024
#            (if datasets refuses it as a script: --hub-revision refs/convert/parquet)
# Batch:     480 = 8 GPUs x 12 with 5 steps
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/lm_openwebtext_124m.py --launcher pytorch --amp \
#                --batch-size 12 --cfg-options optim_wrapper.accumulative_counts=5
# Expected:  not run
_base_ = "_base_/language.py"

model = dict(config=dict(preset="grown_124m", context_length=1024))
train_dataloader = dict(dataset=dict(data_root="data/openwebtext"))
val_dataloader = dict(dataset=dict(data_root="data/openwebtext"))
test_dataloader = val_dataloader
# 480 x 1024 tokens a step, 600,000 steps: nanoGPT's GPT-2, https://github.com/karpathy/nanoGPT
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 2000
train_cfg = dict(max_iters=600_000, val_interval=2000)
auto_scale_lr = dict(base_batch_size=480)
