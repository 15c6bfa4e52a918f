# A TokenFormer of 0.6 M parameters on the bytes of tiny Shakespeare.
#
# Data:      tokenformer-vit prepare-text input.txt data/tinyshakespeare --context-length 128 \
#                --val-share 0.1
# Batch:     32
# Hardware:  one CPU core, shared with other work, float32
# Command:   tokenformer-vit train configs/lm_shakespeare.py
# Expected:  perplexity 4.7 a byte on the held-out tenth (configs/results/lm_shakespeare.json)
_base_ = "_base_/language_small.py"

train_dataloader = dict(dataset=dict(data_root="data/tinyshakespeare"))
val_dataloader = dict(dataset=dict(data_root="data/tinyshakespeare"))
test_dataloader = val_dataloader
