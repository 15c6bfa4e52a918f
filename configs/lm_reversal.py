# A TokenFormer of 0.15 M parameters learns to write 16 digits backwards: the smallest complete
# check of language training.
#
# Data:      tokenformer-vit prepare-text --reversal 20000 --val-share 0.05 data/reversal
# Batch:     64
# Hardware:  one CPU core, shared with other work, float32, 5 minutes
# Command:   tokenformer-vit train configs/lm_reversal.py
# Expected:  100 % of 1,000 unseen sequences right (configs/results/lm_reversal.json)
_base_ = "_base_/language_small.py"

model = dict(
    config=dict(
        context_length=34,
        embed_dim=64,
        depth=2,
        num_heads=2,
        num_qkv_param_tokens=64,
        num_proj_param_tokens=64,
        num_ffn_param_tokens=256,
        positions="learned",
    )
)
train_dataloader = dict(batch_size=64, dataset=dict(data_root="data/reversal"))
val_dataloader = dict(dataset=dict(data_root="data/reversal"))
test_dataloader = val_dataloader
# An answer stands between ">" and the end of the line.
val_evaluator = [
    dict(type="Perplexity"),
    dict(type="AnswerAccuracy", start=ord(">"), end=ord("\n")),
]
test_evaluator = val_evaluator
train_cfg = dict(max_iters=1500, val_interval=250)
auto_scale_lr = dict(base_batch_size=64)
