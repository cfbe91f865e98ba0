"""The checkpoint's sizes and configuration; no two dimensions are equal, so a swap cannot hide."""

from typing import Any

from transformers import Qwen3_5TextConfig

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)  # ids 0, 1, 2
END_OF_TEXT_ID = 0
IM_END_ID = 2

VOCAB_SIZE = 2176

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_fields() -> dict[str, Any]:
    """Return the fields of `text_config`, as a released checkpoint spells them."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT_ID,
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 704,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_value_head_dim": 40,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 6,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def checkpoint_config(transformers_version: str) -> dict[str, Any]:
    """Return config.json: the nested layout of a vision-language release, without its vision part."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "model_type": "qwen3_5",
        "text_config": text_fields(),
        "tie_word_embeddings": True,
        "transformers_version": transformers_version,
    }


def generation_config(transformers_version: str) -> dict[str, Any]:
    """Return generation_config.json; as in chat releases, a list of stop tokens."""
    return {
        "do_sample": False,
        "eos_token_id": [IM_END_ID, END_OF_TEXT_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "transformers_version": transformers_version,
    }


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json."""
    return {
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "model_max_length": text_fields()["max_position_embeddings"],
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def model_config() -> Qwen3_5TextConfig:
    """Return the configuration that the training classes read."""
    fields = text_fields()
    del fields["model_type"], fields["dtype"]
    return Qwen3_5TextConfig(**fields)
