# TokenFormer LM of 151,881,216 parameters on the Pile: the smallest released model.
#
# Paper:     perplexity 10.45 on the Pile; zero-shot average of six tasks 44.7
# Data:      tokenformer-vit prepare-text --hub monology/pile-uncopyrighted data/pile \
#                --tokenizer EleutherAI/gpt-neox-20b --context-length 2048 --val-share 0.0001
#            (This copy lacks the withdrawn parts, which the authors had. A larger held-out share
#            makes each validation long.)
# Batch:     1024 = 8 GPUs x 16 with 8 steps
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/lm_pile_150m.py --launcher pytorch --amp \
#                --batch-size 16 --cfg-options optim_wrapper.accumulative_counts=8
# Expected:  not run
_base_ = "_base_/language.py"

# Keys N(0, 0.02²) and values N(0, (2 / (12·√768))²), as in the authors' code.
model = dict(config=dict(pattention_args=dict(init="released")))
train_dataloader = dict(dataset=dict(data_root="data/pile"))
val_dataloader = dict(dataset=dict(data_root="data/pile"))
test_dataloader = val_dataloader
