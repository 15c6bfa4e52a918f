"""The language model in the shape that transformers expects, around the one that computes."""

from dataclasses import fields, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from tokenformer_vit.errors import InputError
from tokenformer_vit.layers import Pattention
from tokenformer_vit.layers.segments import fuse_state_dict
from tokenformer_vit.models import LMConfig, TokenFormerLM

from .schemas import LMShape, check

__all__ = ["TokenFormerConfig", "TokenFormerForCausalLM"]

# What other models of transformers answer to, and this one does not.
_UNSUPPORTED = ("inputs_embeds", "output_attentions", "output_hidden_states")


class TokenFormerConfig(PretrainedConfig):
    """What transformers knows of a language model; ``config.json`` holds it.

    Args:
        **kwargs: The fields of :class:`~tokenformer_vit.models.LMConfig`, with its defaults, and
            what every configuration of transformers takes. ``hidden_size``, ``num_hidden_layers``,
            ``num_attention_heads``, ``max_position_embeddings`` and ``tie_word_embeddings`` are
            other names of its ``embed_dim``, ``depth``, ``num_heads``, ``context_length`` and
            ``tie_embeddings``.

    Raises:
        InputError: As LMConfig.
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
        """Compare everything; what the base class makes compares the fields that it knows."""
        return isinstance(other, TokenFormerConfig) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def take(self, config: LMConfig) -> None:
        """Set all fields that LMConfig has to those of ``config``."""
        for each in fields(LMConfig):
            setattr(self, each.name, getattr(config, each.name))

    def lm_config(self) -> LMConfig:
        """Return the same as what TokenFormerLM is built from."""
        return LMConfig(**{each.name: getattr(self, each.name) for each in fields(LMConfig)})


class TokenFormerForCausalLM(PreTrainedModel, GenerationMixin):
    """A :class:`~tokenformer_vit.models.TokenFormerLM` for transformers; see its documentation.

    Args:
        config: Shape of the model.

    Attributes:
        model: What computes. Growth, pruning and so on take it, or this class, alike.
        config: Always that of ``model``, also after growth.

    Note:
        In any type of parameters τ stays float32.
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
        self.model.record_param_tokens()  # config.json is to say numbers, not "as many as C"
        self.post_init()

    @property
    def config(self) -> TokenFormerConfig:  # type: ignore[override]
        """The model's configuration, brought up to what TokenFormerLM says of itself."""
        model = self._modules.get("model")
        if isinstance(model, TokenFormerLM) and model.config is not self._known:
            self._config.take(model.config)
            self._known = model.config
        return self._config

    @config.setter
    def config(self, config: TokenFormerConfig) -> None:
        self._config = config

    def init_weights(self) -> None:
        """Leave a new model as it is: its layers have drawn their weights when they were made."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw what a checkpoint lacks; transformers guards what it has loaded."""
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
        """Return the head, or None where the embedding is the head, too."""
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.model.head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the size of the vocabulary, as in every model of transformers."""
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
        """Predict the token after each.

        Args:
            input_ids: (B, N) integers below V: the whole sequence, or what follows that in
                ``past_key_values``.
            attention_mask: (B, all tokens) 1 where a token is one, and 0 where it fills up a
                shorter sequence, on the left or the right.
            position_ids: (B, N) place of each token in its sequence; default: counted from the
                first that the mask lets in.
            past_key_values: Cache of earlier tokens, which grows; any of transformers whose length
                is that of the tokens it holds.
            labels: (B, N) tokens, as ``input_ids``: the one at N is what is to be predicted at
                N - 1. Where it is -100 there is no loss.
            use_cache: Make a cache where none is given; default: unless the model trains.
            logits_to_keep: Number of last tokens for which logits are wanted, or the indices of
                tokens along N; 0 for all.
            **kwargs: What ``loss_function`` takes; what tokenizers and ``generate`` hand on
                besides is left alone.

        Returns:
            Logits (B, N, V), and, where asked for, the mean loss and the cache.

        Raises:
            InputError: If the sequence is longer than the context, or something is asked for that
                the model does not have.
        """
        for name in _UNSUPPORTED:
            if kwargs.pop(name, None) not in (None, False):
                raise InputError(f"a TokenFormer language model does not support {name}")
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise InputError(
                    f"attention_mask has the shape {tuple(attention_mask.shape)}, but (batch, all "
                    "tokens) is wanted; of caches, give one that grows (cache_implementation "
                    "'dynamic')"
                )
            # Without a mask attention can take its fast causal path.
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

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a folder that ``from_pretrained`` reads, as every model of transformers does.

        Args:
            save_directory: Gets ``config.json`` and ``model.safetensors``.
            is_main_process: As in the base class.
            state_dict: As in the base class. Layers that hold old and new pairs apart are joined,
                so that the model is read as an ordinary one.
            **kwargs: As in the base class.
        """
        state_dict = fuse_state_dict(self.state_dict() if state_dict is None else state_dict)
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
