"""Language models of TokenFormer blocks as models of Hugging Face's transformers."""

import shutil
import warnings
from contextlib import suppress
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification as Classification
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.arguments import COUNTS, counts_by_block, model_pattention_args
from tokenformer_vit.layers.pattention import join_state_dict
from tokenformer_vit.models import LMConfig
from tokenformer_vit.models.causal_lm import (
    CausalAttention,
    CausalBlock,
    find_positions,
    find_turns,
)
from tokenformer_vit.models.checkpoints import check_computation, computation_of
from tokenformer_vit.models.sizes import (
    check_not_fused,
    layer_arguments,
    model_sizes,
    nest_layers,
    set_size,
)

# Arguments of from_pretrained that say where the files of a model are.
_PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
# File that finds the classes below in a process that has not imported this package.
_FINDER = Path(__file__).with_name("modeling_tokenformer.py")


class TokenFormerConfig(PretrainedConfig, LMConfig):
    """The configuration of a language model, which ``config.json`` holds.

    Args:
        **kwargs: Fields of :class:`~tokenformer_vit.models.LMConfig`, ``use_cache`` (whether models
            return a cache; default: True), and the arguments of every configuration of
            transformers. ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``,
            ``max_position_embeddings`` and ``tie_word_embeddings`` are other names of
            ``embed_dim``, ``depth``, ``num_heads``, ``context_length`` and ``tie_embeddings``.

    Raises:
        InputError: As LMConfig does, or if a name is unknown, or two names of a field get different
            values.
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012  # of transformers' own type
    # Stored under the names of transformers: other libraries look for them in to_dict().
    attribute_map = {  # noqa: RUF012
        "embed_dim": "hidden_size",
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "context_length": "max_position_embeddings",
        "tie_embeddings": "tie_word_embeddings",
    }

    # Declared, because transformers drops undeclared arguments of generation.
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Take the arguments that are no fields, and check the values."""
        for name, stored in self.attribute_map.items():
            value, given = getattr(self, name), kwargs.get(stored, getattr(self, name))
            if value not in (given, getattr(LMConfig, name)):
                raise InputError(
                    f"{stored} is {given!r}, but {name}, another name of it, is {value!r}: give "
                    "one of the two"
                )
        kwargs.pop("auto_map", None)  # a file's own may lead to any code
        PretrainedConfig.__post_init__(self, **kwargs)
        LMConfig.__post_init__(self)
        ours = {*self.__dataclass_fields__, *self.attribute_map.values()}
        unknown = vars(self).keys() - ours - {*dir(PretrainedConfig)}  # transformers keeps any name
        for name in sorted(each for each in unknown if each[0] != "_"):
            close = ", ".join(get_close_matches(name, ours)) or "none"
            fault = (
                f"a TokenFormer has no {name}: correct it (close names: {close}), or leave it out"
            )
            if self.transformers_version is None:
                raise InputError(fault)
            # Saved, perhaps by another library or a later version of transformers.
            warnings.warn(fault, stacklevel=2)
        kinds = ("Config", "Model", "ModelForCausalLM", "ModelForSequenceClassification")
        names = {f"Auto{kind}": f"TokenFormer{kind.replace('ModelFor', 'For')}" for kind in kinds}
        self.auto_map = {auto: f"{_FINDER.stem}.{name}" for auto, name in names.items()}

    def to_json_file(self, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        """Write the configuration, and next to it the file that its ``auto_map`` names."""
        super().to_json_file(json_file_path, *args, **kwargs)
        shutil.copyfile(_FINDER, Path(json_file_path).with_name(_FINDER.name))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: a saved folder finds this class in the package, and needs no copy of it."""


class TokenFormerLayer(GradientCheckpointingLayer, CausalBlock):
    """A :class:`~tokenformer_vit.models.causal_lm.CausalBlock` that transformers recognises."""


class TokenFormerPreTrainedModel(PreTrainedModel):
    """What all TokenFormer language models of transformers have in common.

    τ stays float32 when the model is cast to another dtype.
    """

    config_class = TokenFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ["TokenFormerLayer"]  # noqa: RUF012  # of transformers' own type
    _skip_keys_device_placement = ["cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    sizes, set_size = property(model_sizes), set_size
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TokenFormerLayer,
        "attentions": CausalAttention,
    }

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as every model of transformers, if it computes what its weights are for.

        Raises:
            InputError: If Θ, the heads, their rotated share, an epsilon or the nested sizes differ
                from the saved ones, or for a ``quantization_config``, which would quantise nothing.
        """
        if kwargs.get("quantization_config") is not None:
            raise InputError(
                "quantization_config quantises linear layers, which the blocks of a TokenFormer "
                "lack: load it without, and see examples/quantize.py"
            )
        source, saved = pretrained_model_name_or_path, dict[str, Any]()
        loaded = super().from_pretrained(source, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        where = {key: value for key, value in kwargs.items() if key in _PLACES}
        with suppress(OSError):  # the folder of an adapter of peft, or weights alone
            saved = {} if source is None else TokenFormerConfig.get_config_dict(source, **where)[0]
        if saved.get("model_type") == TokenFormerConfig.model_type:
            check_computation(model, asdict(TokenFormerConfig(**saved)), source)
        return loaded

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as every model of transformers; after ``add_adapter`` only the adapter."""
        if not self._hf_peft_config_loaded:  # else peft has wrapped the layers
            check_not_fused(self)
            decoder: Any = self.base_model
            decoder.record_param_tokens()  # another model of the same config may have grown
            if any(".new_" in name for name, _ in self.named_parameters()):
                kwargs.setdefault("state_dict", join_state_dict(self.state_dict()))
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: a saved folder finds this class in the package, and needs no copy of it."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a layer; transformers protects tensors that it loaded."""
        if isinstance(module, Pattention):
            tau: Any = module.tau
            loaded = tau.clone() if getattr(tau, "_is_hf_initialized", False) else None
            module.reset_parameters()
            if loaded is not None:  # no function of torch.nn.init fills it
                tau.copy_(loaded)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


class TokenFormerModel(TokenFormerPreTrainedModel):
    """A causal language model without its head; TokenFormer, arXiv:2410.23168, Section 4.2.

    Attributes:
        config: Configuration. ``save_pretrained`` and ``record_param_tokens`` write into it what
            growth and pruning have changed.
    """

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        LMConfig.__post_init__(config)  # from_pretrained may have changed fields after it
        self.gradient_checkpointing = False
        width, depth = config.embed_dim, config.depth
        shared = model_pattention_args(config.pattention_args, width, depth)
        counts = {name: getattr(config, name) for name in COUNTS.values()}
        self.embedding, self.positions = nn.Embedding(config.vocab_size, width), None
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, width)
        self.blocks = nn.ModuleList(
            TokenFormerLayer(
                width,
                config.num_heads,
                **numbers,
                theta=config.theta,
                norm=config.norm,
                norm_eps=config.norm_eps,
                residual_init_gain=(2 * depth) ** -0.5,
                pattention_args=shared,
            )
            for numbers in counts_by_block(depth, **counts)
        )
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        for number, block in enumerate(self.blocks):
            attention: Any = block.attn
            attention.layer_idx = number
            attention.config = config  # flash attention reads it
        nest_layers(self, config.nested, config.nested_kinds)
        self.record_param_tokens()  # config.json gets numbers, not None for "as many as C"
        self.post_init()

    def record_param_tokens(self) -> None:
        """Write the pairs and sizes of the layers into ``config``, as saving a model does."""
        for name, value in layer_arguments(self, self.config.pattention_args).items():
            setattr(self.config, name, value)

    def computation(self) -> dict[str, Any]:
        """Return the fields of the configuration that the tensors do not show."""
        now = layer_arguments(self, self.config.pattention_args)
        return computation_of({**asdict(self.config), **now})

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the features that a head reads.

        Args:
            input_ids: (B, N) integers below V: the whole sequence, or what follows the cache.
            attention_mask: (B, all tokens) 1 for tokens, 0 for padding on the left or right; or
                the mask that the attention function takes, such as (B or 1, 1, N, all tokens).
            position_ids: (B, N) position of each token in its sequence, below the context length
                if positions are learned; default: counted from the first token that is not padding.
                Without mask and cache, a position that does not follow the one before begins
                another sequence.
            inputs_embeds: (B, N, C) embedded tokens, instead of ``input_ids``.
            cache: Any cache of transformers.
            use_cache: Whether to make a cache if none is given; default: ``config.use_cache``.
            **kwargs: ``output_hidden_states``, ``output_attentions`` (with
                ``attn_implementation="eager"``), and arguments of the attention function.

        Returns:
            Features (B, N, C), the cache if there is one, and what was asked for.

        Raises:
            InputError: If the sequence is longer than the context, without ``position_ids``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        if position_ids is None:  # a paged cache, which has no length, comes with positions
            past = 0 if cache is None else cache.get_seq_length()
            padding = attention_mask if getattr(attention_mask, "ndim", 0) == 2 else None
            position_ids = find_positions(x, past, padding, self.config.context_length)
        if use_cache and cache is None:  # after the mask, which looks for packed rows
            cache = DynamicCache(config=self.config)
        name = str(self.config._attn_implementation)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        kwargs |= {"cache": cache, "attend": attend, "position_ids": position_ids}
        turns = None
        if self.positions is not None:
            x = x + self.positions(position_ids)
        else:
            turns = find_turns(position_ids, self.config.rotary_dims, self.config.rotary_base)
        # transformers lowers the depth while the first blocks draft (assistant_early_exit).
        for block in list(self.blocks)[: self.config.depth]:
            x = block(x, mask, turns, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), cache=cache)


class TokenFormerForCausalLM(TokenFormerPreTrainedModel, GenerationMixin):
    """A :class:`TokenFormerModel` with a head that predicts the next token.

    ``generate`` ends at the latest with the context.

    Attributes:
        model: The TokenFormerModel. Growth, pruning and masks accept it or this class.
        lm_head: The head, a linear layer without bias. Its weight can be the embedding.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self.model = TokenFormerModel(config)
        self.lm_head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.post_init()

    # No public way: on a GPU, generate() may read a StoppingCriteria one step too late.
    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """Let ``generate`` end with the context, and refuse a prompt that leaves no room."""
        context, prompt = self.config.context_length, kwargs["inputs_tensor"].shape[1]
        if prompt >= context:
            raise InputError(
                f"the prompt has {prompt} tokens, but the model's context_length is {context}: "
                "shorten it to leave room for new tokens"
            )
        config = super()._prepare_generated_length(*args, **kwargs)  # type: ignore[misc]
        # After a prompt of embeddings, the output has only the new tokens.
        config.max_length = min(config.max_length, context - prompt + kwargs["input_ids_length"])
        return config

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at each position.

        Args, besides those of :meth:`TokenFormerModel.forward`:
            labels: (B, N) tokens, not shifted: a token is the target of the position before it.
                -100 gives no loss.
            logits_to_keep: Number of last tokens that get logits, or the indices of tokens along
                N; 0 for all.
            **kwargs: Arguments of ``loss_function``.

        Returns:
            Logits (B, N, V), the mean loss if there are labels, and what TokenFormerModel returns.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        others = {name: outputs[name] for name in outputs if name != "last_hidden_state"}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **others)


class TokenFormerForSequenceClassification(Classification, TokenFormerPreTrainedModel):
    """A :class:`TokenFormerModel` with a head that classifies texts by their last token."""


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend by two products; return the weights too. The mask is boolean, or is added."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=precise).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
