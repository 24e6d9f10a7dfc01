"""A GGUF file of a tiny random model, for a real llama.cpp server that starts in a moment."""

from pathlib import Path

import gguf
import torch
from transformers import PreTrainedModel

VOCABULARY = 300
EOS = 256


def byte_letters() -> list[str]:
    """The printable letters that byte-level BPE writes the 256 bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Writes a Llama model of `VOCABULARY` tokens in float32; its tokenizer knows bytes, `EOS` and made-up words."""
    config, weights = model.config, model.state_dict()
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = byte_letters()
    words = ["QZ"[n // 26] + chr(ord("a") + n % 26) for n in range(VOCABULARY - 257)]
    writer.add_token_list([*letters, "<eos>", *words])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([normal] * 256 + [control] + [normal] * len(words))
    writer.add_token_merges([" ".join(word) for word in words])
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tensors = {"token_embd": weights["model.embed_tokens.weight"], "output_norm": weights["model.norm.weight"]}
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            tensors[f"blk.{layer}.{ours}"] = weights[f"model.layers.{layer}.{theirs}.weight"]
        # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
        for name, count in ((f"blk.{layer}.attn_q", heads), (f"blk.{layer}.attn_k", groups)):
            rows = tensors[name].unflatten(0, (count, 2, -1))
            tensors[name] = rows.transpose(1, 2).flatten(0, 2)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor.to(torch.float32).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
