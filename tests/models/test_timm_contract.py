

@pytest.mark.parametrize("kwargs", [{}, {"pos_embed": "none", "use_rot_pos_emb": True}])
def test_weight_decay_leaves_out_parameters_that_exist(kwargs):
    model = timm.create_model("tokenformer_tiny", img_size=32, depth=1, **kwargs)
    names = {name for name, _ in model.named_parameters()}
    assert "cls_token" in model.no_weight_decay() <= names
