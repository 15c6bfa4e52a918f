# Small models on the bytes of small texts: minutes on a CPU.
_base_ = "language.py"

model = dict(
    config=dict(
        _delete_=True,
        vocab_size=264,  # bytes, end of text and padding, up to a multiple of eight
        context_length=128,
        embed_dim=96,
        depth=4,
        num_heads=4,
        num_qkv_param_tokens=96,
        num_proj_param_tokens=96,
        num_ffn_param_tokens=384,
        positions="rotary",
        rotary_share=0.25,
        tie_embeddings=True,
        theta="gelu_l2",
    )
)
train_dataloader = dict(batch_size=32, num_workers=0)
val_dataloader = dict(batch_size=64, num_workers=0)
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=2e-3))
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = 100
param_scheduler[1].update(eta_min=2e-4, begin=100)
train_cfg = dict(max_iters=2000, val_interval=200)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=200))
auto_scale_lr = dict(base_batch_size=32)
