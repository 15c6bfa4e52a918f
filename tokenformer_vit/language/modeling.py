"""TokenFormerLM as a model of Hugging Face's transformers."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.models.sizes import find_layers

from .schemas import LMShape, check

# Arguments that other models of transformers have.
_UNSUPPORTED = ("inputs_embeds", "output_attentions", "output_hidden_states")


class TokenFormerConfig(PretrainedConfig):
    """The configuration of a language model, which ``config.json`` holds.

    Args:
        **kwargs: Fields of :class:`~tokenformer_vit.models.LMConfig`, and the arguments of every
            configuration of transformers. ``hidden_size``, ``num_hidden_layers``,
            ``num_attention_heads``, ``max_position_embeddings`` and ``tie_word_embeddings`` are
            other names of ``embed_dim``, ``depth``, ``num_heads``, ``context_length`` and
            ``tie_embeddings``.

    Raises:
        InputError: As LMConfig does.
    """

    model_type = "tokenformer"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  # of transformers' own type
    attribute_map = {  # noqa: RUF012
        "hidden_size": "embed_dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
        "max_position_embeddings": "context_length",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(self, **kwargs: Any) -> None:
        names = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        shape = {each.name: names.pop(each.name) for each in fields(LMConfig) if each.name in names}
        checked: Any = check(LMShape, shape)
        self.take(LMConfig(**checked))
        super().__init__(**names)

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


class TokenFormerForCausalLM(PreTrainedModel, GenerationMixin):
    """A :class:`~tokenformer_vit.models.TokenFormerLM` for transformers.

    Args:
        config: Shape of the model.

    Attributes:
        model: The TokenFormerLM. Growth, pruning and masks accept it or this class.
        config: Configuration, which follows the growth of ``model``.

    Note:
        τ stays float32 when the model is cast to another dtype.
    """

    config_class = TokenFormerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["CausalBlock"]  # noqa: RUF012

    _known: LMConfig | None = None

    def __init__(self, config: TokenFormerConfig) -> None:
        super().__init__(config)
        self.model = TokenFormerLM(config.lm_config())
        self.model.record_param_tokens()  # config.json gets numbers, not None for "as many as C"
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as every model of transformers; refuse other nested sizes than its own."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, layer in find_layers(model).items():  # transformers replaces tensors unchecked
            layer.check_nested(layer.state_dict(prefix=f"{name}."), f"{name}.")
        return loaded

    @property
    def config(self) -> TokenFormerConfig:  # type: ignore[override]
        """Configuration, updated from ``model.config`` if that has changed."""
        model = self._modules.get("model")
        if isinstance(model, TokenFormerLM) and model.config is not self._known:
            self._config.take(model.config)
            self._known = model.config
        return self._config

    @config.setter
    def config(self, config: TokenFormerConfig) -> None:
        self._config = config

    def init_weights(self) -> None:
        """Do nothing: the layers of a new model have already drawn their weights."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights that a checkpoint lacks; transformers protects those that it loaded."""
        if isinstance(module, Pattention | nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens."""
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        self.model.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the head, or None if the embedding is also the head."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.model.head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the size of the vocabulary, as every model of transformers does."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = replace(self.model.config, vocab_size=embedding.num_embeddings)
        return embedding

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token at each position.

        Args:
            input_ids: (B, N) integers below V: the whole sequence, or the tokens that follow those
                in ``past_key_values``.
            attention_mask: (B, all tokens) 1 for tokens, 0 for padding on the left or right.
            position_ids: (B, N) position of each token in its sequence; default: counted from the
                first token that is not padding.
            past_key_values: Cache of earlier tokens; any cache of transformers that grows.
            labels: (B, N) tokens, not shifted: a token is the target of the position before it.
                -100 gives no loss.
            use_cache: Whether to make a cache if none is given; default: only in evaluation mode.
            logits_to_keep: Number of last tokens that get logits, or the indices of tokens along
                N; 0 for all.
            **kwargs: Arguments of ``loss_function``. Other arguments of tokenizers and
                ``generate`` are ignored.

        Returns:
            Logits (B, N, V), the mean loss if there are labels, and the cache if there is one.

        Raises:
            InputError: If the sequence is longer than the context, or an argument is not
                supported.
        """
        for name in _UNSUPPORTED:
            if kwargs.pop(name, None) not in (None, False):
                raise InputError(f"a TokenFormer language model does not support {name}; remove it")
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise InputError(
                    f"attention_mask must have the shape (batch, all tokens), but got "
                    f"{tuple(attention_mask.shape)}; use a cache that grows "
                    "(cache_implementation 'dynamic')"
                )
            # Without a mask attention takes its fast causal path.
            if not torch.compiler.is_compiling() and bool(attention_mask.all()):
                attention_mask = None
        if past_key_values is None and (not self.training if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        features = self.model.features(input_ids, attention_mask, past_key_values, position_ids)
        if isinstance(logits_to_keep, Tensor):
            features = features[:, logits_to_keep]
        elif logits_to_keep:
            features = features[:, -logits_to_keep:]
        logits = self.model.logits(features)  # (B, N or as many as are kept, V)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
