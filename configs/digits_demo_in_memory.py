# digits_demo with its images in memory, on the GPU if there is one, and augmented by the batch.
#
# Paper:     none
# Data:      as for digits_demo
# Batch:     64
# Hardware:  not run in full
# Command:   tokenformer-vit train configs/digits_demo_in_memory.py
# Expected:  as digits_demo: the same augmentation, with other random numbers
_base_ = "digits_demo.py"

train_dataloader = dict(dataset=dict(type="ImagesInMemory"))
val_dataloader = dict(dataset=dict(type="ImagesInMemory"))
test_dataloader = val_dataloader
