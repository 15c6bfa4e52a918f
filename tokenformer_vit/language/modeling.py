"""Language models of TokenFormer blocks as models of Hugging Face's transformers."""

import shutil
import warnings
from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import LMConfig, TokenFormerDecoder
from tokenformer_vit.models.causal_block import CausalAttention, CausalBlock
from tokenformer_vit.models.causal_lm import EMBEDDING_STD, find_positions
from tokenformer_vit.models.checkpoints import check_computation
from tokenformer_vit.models.sizes import Size
from tokenformer_vit.ops import linear

from .schemas import LMShape, check

# Name of the cache in outputs and for masks: from transformers 5.24 on, cache.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"

# Arguments of from_pretrained that say where the files of a model are.
_PLACES = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")

# File that finds the classes below in a process that has not imported this package.
_FINDER = Path(__file__).with_name("modeling_tokenformer.py")


class TokenFormerConfig(PretrainedConfig):
    """The configuration of a language model, which ``config.json`` holds.

    Args:
        **kwargs: Fields of :class:`~tokenformer_vit.models.LMConfig`, ``use_cache`` (whether models
            return a cache; default: True), and the arguments of every configuration of
            transformers. ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``,
            ``max_position_embeddings`` and ``tie_word_embeddings`` are other names of
            ``embed_dim``, ``depth``, ``num_heads``, ``context_length`` and ``tie_embeddings``.

    Raises:
        InputError: As LMConfig does.
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  # of transformers' own type
    attribute_map = {  # noqa: RUF012
        "hidden_size": "embed_dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "context_length",
        "tie_word_embeddings": "tie_embeddings",
    }

    # Declared, because transformers drops undeclared arguments of generation.
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __init__(self, **kwargs: Any) -> None:
        for other, name in self.attribute_map.items():
            if other in kwargs and name in kwargs and kwargs[other] != kwargs[name]:
                raise InputError(
                    f"{name} is {kwargs[name]!r}, but {other}, another name of it, is "
                    f"{kwargs[other]!r}: give one of the two"
                )
        _check_unquantised(kwargs.get("quantization_config"))
        names = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        shape = {each.name: names.pop(each.name) for each in fields(LMConfig) if each.name in names}
        checked: Any = check(LMShape, shape)
        self.take(LMConfig(**checked))
        self.use_cache = names.pop("use_cache", True)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, token, names.pop(token, None))
        names.pop("auto_map", None)  # a file's own may lead to any code
        super().__init__(**names)
        self.auto_map = {
            auto_class: f"{_FINDER.stem}.{name}"
            for auto_class, name in (
                ("AutoConfig", "TokenFormerConfig"),
                ("AutoModel", "TokenFormerModel"),
                ("AutoModelForCausalLM", "TokenFormerForCausalLM"),
                ("AutoModelForSequenceClassification", "TokenFormerForSequenceClassification"),
            )
        }

    def __eq__(self, other: object) -> bool:
        """Compare all attributes; the base class compares only those that it knows."""
        return isinstance(other, TokenFormerConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def take(self, config: LMConfig) -> None:
        """Copy all fields of ``config``."""
        for each in fields(LMConfig):
            setattr(self, each.name, getattr(config, each.name))

    def lm_config(self) -> LMConfig:
        """Return the configuration that TokenFormerLM takes."""
        return LMConfig(**{each.name: getattr(self, each.name) for each in fields(LMConfig)})

    def to_json_file(self, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        """Write the configuration, and next to it the file that its ``auto_map`` names."""
        super().to_json_file(json_file_path, *args, **kwargs)
        shutil.copyfile(_FINDER, Path(json_file_path).with_name(_FINDER.name))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: a saved folder finds this class in the package, and needs no copy of it."""


def _check_unquantised(quantization_config: Any) -> None:
    """Refuse a configuration of quantisation: it would quantise nothing, silently."""
    if quantization_config is not None:
        raise InputError(
            "quantization_config quantises linear layers, which a TokenFormer does not have: load "
            "the model without it, then quantise it as examples/quantize.py does"
        )


class TokenFormerLayer(GradientCheckpointingLayer, CausalBlock):
    """A :class:`~tokenformer_vit.models.causal_block.CausalBlock` that transformers recognises."""


class TokenFormerPreTrainedModel(PreTrainedModel):
    """What all TokenFormer language models of transformers have in common.

    Note:
        τ stays float32 when the model is cast to another dtype.
    """

    config_class = TokenFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ["TokenFormerLayer"]  # noqa: RUF012  # of transformers' own type
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": TokenFormerLayer,
        "attentions": CausalAttention,
    }

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as every model of transformers, if it computes what its weights are for.

        Raises:
            InputError: If Θ, the heads, their rotated share, an epsilon or the nested sizes differ
                from the saved ones, or ``quantization_config`` is given.
        """
        _check_unquantised(kwargs.get("quantization_config"))
        _check_unquantised(getattr(kwargs.get("config"), "quantization_config", None))
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        cls._check_computation(model, *args, **kwargs)
        for name, layer in model.named_modules():  # transformers replaces tensors unchecked
            if isinstance(layer, Pattention):  # perhaps in an adapter of peft, which it loads too
                layer.check_nested(layer.state_dict(prefix=f"{name}."), f"{name}.")
        return loaded

    @classmethod
    def _check_computation(cls, model: nn.Module, source: Any = None, **kwargs: Any) -> None:
        """Compare a loaded model with the ``config.json`` of its weights."""
        if source is None:  # a state dict, which has no configuration of its own
            return
        where = {key: value for key, value in kwargs.items() if key in _PLACES}
        try:
            saved, _ = TokenFormerConfig.get_config_dict(source, **where)
        except OSError:  # the folder of an adapter of peft, or weights alone
            return
        check_computation(model, saved, source)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as every model of transformers; after ``add_adapter`` only the adapter."""
        if not self._hf_peft_config_loaded:  # else peft has wrapped the layers
            for module in self.modules():
                if isinstance(module, TokenFormerDecoder):
                    module.record_param_tokens()  # another model of the same config may have grown
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: a saved folder finds this class in the package, and needs no copy of it."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a layer; transformers protects tensors that it loaded."""
        if isinstance(module, Pattention):
            tau = module.nested_tau
            if tau is None or not getattr(tau, "_is_hf_initialized", False):
                module.reset_parameters()
            else:  # no function of torch.nn.init fills it
                loaded = tau.clone()
                module.reset_parameters()
                tau.copy_(loaded)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)


class TokenFormerModel(TokenFormerDecoder, TokenFormerPreTrainedModel):
    """A :class:`~tokenformer_vit.models.TokenFormerDecoder` for transformers.

    Args:
        config: Shape of the model.

    Attributes:
        config: Configuration, which follows growth and pruning.
    """

    block = TokenFormerLayer

    def __init__(self, config: TokenFormerConfig) -> None:
        TokenFormerPreTrainedModel.__init__(self, config)
        self.gradient_checkpointing = False
        self.build(config.lm_config())
        for block in self.blocks:
            block.attn.config = self.config  # type: ignore[union-attr]  # flash attention reads it
        self.record_param_tokens()  # config.json gets numbers, not None for "as many as C"
        if not self.embedding.weight.is_meta:
            self._keep_weights()
        self.post_init()

    def _keep_weights(self) -> None:
        """Keep post_init() from drawing the weights again that the layers have drawn."""
        for module in self.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]

    @property
    def shape(self) -> LMConfig:
        """The shape of the model now, after growth or pruning."""
        return self.config.lm_config()

    def record_param_tokens(self) -> None:
        """Update the numbers of pairs and the sizes in ``config`` after growth or pruning."""
        self.config.take(self._recorded())

    @merge_with_config_defaults
    @capture_outputs
    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the features that a head reads.

        Args:
            input_ids: (B, N) integers below V: the whole sequence, or the tokens that follow those
                in ``past_key_values``.
            attention_mask: (B, all tokens) 1 for tokens, 0 for padding on the left or right; or
                the mask that the attention function takes, such as (B or 1, 1, N, all tokens).
            position_ids: (B, N) position of each token in its sequence, below the context length
                if positions are learned; default: counted from the first token that is not padding.
                Without mask and earlier tokens, a position that does not follow the one before
                begins another sequence.
            past_key_values: Any cache of transformers.
            inputs_embeds: (B, N, C) embedded tokens, instead of ``input_ids``.
            use_cache: Whether to make a cache if none is given; default: ``config.use_cache``.
            cache: The name of ``past_key_values`` from transformers 5.24 on.
            **kwargs: ``output_hidden_states``, ``output_attentions`` (with
                ``attn_implementation="eager"``), and arguments of the attention function.

        Returns:
            Features (B, N, C), the cache if there is one, and what was asked for.

        Raises:
            InputError: If the sequence is longer than the context, or there is not exactly one of
                ``input_ids`` and ``inputs_embeds``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        past_key_values = _given(past_key_values, cache)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        packed = position_ids is not None and attention_mask is None and past_key_values is None
        # Reading the length of a static cache would wait for the device.
        if isinstance(past, int) and not packed:
            self.check_length(past + x.shape[1])
        mask = self._mask(x, attention_mask, past_key_values, position_ids)
        if position_ids is None:
            padding = attention_mask if getattr(attention_mask, "ndim", 0) == 2 else None
            position_ids = find_positions(x, past, padding)
        if use_cache and past_key_values is None:  # after the mask, which looks for packed rows
            past_key_values = DynamicCache(config=self.config)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        x = self.run_blocks(
            x,
            position_ids,
            mask,
            past_key_values,
            attend=partial(attend, position_ids=position_ids, **kwargs),
        )
        return BaseModelOutputWithPast(last_hidden_state=x, **{CACHE: past_key_values})

    def _mask(self, x: Tensor, attention_mask: Any, cache: Any, position_ids: Tensor | None) -> Any:
        """Return the mask that the attention function takes."""
        plain = self.config._attn_implementation == "sdpa" and not getattr(
            cache, "is_compileable", False
        )
        N = x.shape[1]
        if plain and type(N) is int and N == 1:  # one token sees all others; a trace fits any N
            if attention_mask is None:
                return None
            if x.device.type != "cpu" and getattr(attention_mask, "ndim", 0) == 2:
                length = N + (0 if cache is None else cache.get_seq_length())
                if attention_mask.shape[1] == length:
                    # To find out whether there is padding, transformers would wait for the device.
                    return attention_mask.bool()[:, None, None]
        earlier: dict[str, Any] = {CACHE: cache}
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **earlier,
        )


class _Head(nn.Linear):
    """A linear layer whose call for one token is faster."""

    def forward(self, input: Tensor) -> Tensor:
        if self.bias is not None:  # another library may add one
            return super().forward(input)
        return linear(input, self.weight)


class TokenFormerForCausalLM(TokenFormerPreTrainedModel, GenerationMixin):
    """A :class:`TokenFormerModel` with a head that predicts the next token.

    Args:
        config: Shape of the model.

    Attributes:
        model: The TokenFormerModel. Growth, pruning and masks accept it or this class.
        lm_head: The head, a linear layer without bias. Its weight can be the embedding.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self.model = TokenFormerModel(config)
        # A tied head gets its weight in post_init(), and draws none.
        device = "meta" if config.tie_embeddings else None
        self.lm_head = _Head(config.embed_dim, config.vocab_size, bias=False, device=device)
        self.post_init()

    @property
    def sizes(self) -> tuple[Size, ...]:
        """The nested sizes, smallest first, then 1.0 for the whole model."""
        return self.model.sizes

    def set_size(self, size: Size | None) -> None:
        """Use only the first pairs of every layer; see :meth:`.TokenFormerDecoder.set_size`."""
        self.model.set_size(size)

    def prepare_inputs_for_generation(  # transformers looks for `inputs_embeds` by name
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Prepare a step of ``generate``; a static cache would not say that the context is full.

        Raises:
            InputError: If the sequence is longer than the context.
        """
        # After a prompt of embeddings, `input_ids` has only the new tokens. These have all, but
        # transformers drops a mask that hides nothing, and a mask may be one of four dimensions.
        known: Any = (input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids"))
        lengths = [each.shape[1] for each in known if getattr(each, "ndim", 0) == 2]
        self.model.check_length(max(lengths))
        return super().prepare_inputs_for_generation(  # type: ignore[misc]  # of its own protocol
            input_ids, *args, inputs_embeds=inputs_embeds, **kwargs
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at each position.

        Args:
            input_ids: See :meth:`TokenFormerModel.forward`, also for the arguments that are not
                listed here.
            attention_mask: See there.
            position_ids: See there.
            past_key_values: See there.
            inputs_embeds: See there.
            labels: (B, N) tokens, not shifted: a token is the target of the position before it.
                -100 gives no loss.
            use_cache: See there.
            logits_to_keep: Number of last tokens that get logits, or the indices of tokens along
                N; 0 for all.
            cache: See there.
            **kwargs: Arguments of TokenFormerModel and of ``loss_function``.

        Returns:
            Logits (B, N, V), the mean loss if there are labels, and what TokenFormerModel returns.

        Raises:
            InputError: See there.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=_given(past_key_values, cache),
            **kwargs,
        )
        kept: Any = logits_to_keep
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )


class TokenFormerForSequenceClassification(
    GenericForSequenceClassification, TokenFormerPreTrainedModel
):
    """A :class:`TokenFormerModel` with a head that classifies texts by their last token."""


def _given(past_key_values: Any, cache: Any) -> Any:
    """Return the cache, which has two names; transformers warns of the old one from 5.24 on."""
    if past_key_values is None:
        return cache
    if CACHE == "cache":
        text = "`past_key_values` is deprecated: transformers 5.24 calls it `cache`"
        warnings.warn(text, FutureWarning, stacklevel=3)
    return past_key_values


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attend by two products; returns the weights too. See :func:`.causal_block.attend`.

    Args:
        module: The attention layer.
        query: (B, heads, N, D) queries.
        key: (B, heads, all tokens, D) keys.
        value: (B, heads, all tokens, D) values.
        attention_mask: (B or 1, 1, N, all tokens) mask: boolean, true where attention is allowed,
            or numbers that are added to the scores.
        scaling: Factor of the scores.
        **kwargs: Arguments of other attention functions.

    Returns:
        (B, N, heads, D) outputs, and (B, heads, N, all tokens) weights.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=precise).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights
