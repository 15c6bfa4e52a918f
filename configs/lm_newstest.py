# lm_micro on English news, the first text of ablations that go on with other languages or text.
#
# Paper:     no such run; a course report trains 12 × 768 on three languages of CulturaX
# Data:      python tools/prepare_text.py newstest2009-2013.en data/newstest_en \
#                --context-length 64 --val-share 0.1 (and the same for fr and es)
# Batch:     32
# Hardware:  one CPU core; the minutes are in ablations/TABLES.md
# Command:   python tools/train.py configs/lm_newstest.py
# Expected:  see ablations/TABLES.md
_base_ = "lm_micro.py"

train_dataloader = dict(dataset=dict(data_root="data/newstest_en"))
val_dataloader = dict(
    dataset=dict(data_root=["data/newstest_en", "data/newstest_fr", "data/newstest_es"])
)
test_dataloader = val_dataloader
