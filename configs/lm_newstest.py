# lm_micro on English news, the first of several texts: for the ablations of new text and languages.
#
# Paper:     none; a course report trains 12 × 768 on three languages of CulturaX
# Data:      tokenformer-vit prepare-text newstest2009-2013.en data/newstest_en \
#                --context-length 64 --val-share 0.1, and so fr and es
# Batch:     32
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/lm_newstest.py
# Expected:  the figures of ablations/TABLES.md
_base_ = "lm_micro.py"

train_dataloader = dict(dataset=dict(data_root="data/newstest_en"))
val_dataloader = dict(
    dataset=dict(data_root=["data/newstest_en", "data/newstest_fr", "data/newstest_es"])
)
test_dataloader = val_dataloader
