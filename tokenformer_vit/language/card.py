"""The model card of a language model that is saved."""

from transformers import PreTrainedModel

from tokenformer_vit.layers import Pattention
from tokenformer_vit.models.card import CardFacts, describe_pairs, model_card

_USAGE = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")  # or "USER/NAME" on the hub
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
tokens = model.generate(**inputs, max_new_tokens=20, pad_token_id=tokenizer.pad_token_id)
print(tokenizer.decode(tokens[0]))
"""


def language_card(model: PreTrainedModel, facts: CardFacts) -> str:
    """Write the card of a language model, with the facts that the model itself knows.

    Args:
        model: Causal language model of transformers.
        facts: Other facts.

    Returns:
        The content of README.md.
    """
    config, pairs = model.config, describe_pairs(model)
    longest = getattr(config, "max_position_embeddings", None)
    thetas = dict.fromkeys(each.theta for each in model.modules() if isinstance(each, Pattention))
    about = {
        "Model type": f"`{config.model_type}`",
        "Blocks": f"{config.num_hidden_layers}, of width {config.hidden_size} with "
        f"{config.num_attention_heads} heads",
        "Key-value pairs": pairs or None,
        "Θ": ", ".join(thetas) or None,
        "Parameters": f"{model.num_parameters():,}",
        "Vocabulary": f"{config.vocab_size:,} entries",
        "Context": f"{longest:,} tokens" if longest else None,
    }
    register = "import tokenformer_vit.language  # registers the model type" if pairs else ""
    return model_card(
        f"{config.model_type} language model",
        "transformers",
        "text-generation",
        register + _USAGE,
        facts._replace(sections={"Model": about, **facts.sections}),
        tags=("tokenformer",) if pairs else (),
    )
