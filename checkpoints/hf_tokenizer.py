"""tokenizer.json and its companions in a Hugging Face folder to a TokenizerSpec."""

import pathlib

from tokenizers import Tokenizer

from headrace.checkpoints.hf_config import read_json
from headrace.checkpoints.tokenizer_spec import TokenizerSpec


def tokenizer_spec(folder: pathlib.Path) -> TokenizerSpec:
    """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Raises:
      ValueError: no tokenizer.json, or one that the package `tokenizers` refuses.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json; a SentencePiece model or vocab.json must "
            f"be saved as one first"
        )
    text = _read(path)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{path} is damaged or too new: {error}") from None
    companion = folder / "tokenizer_config.json"
    settings = read_json(companion) if companion.exists() else {}
    bos = _text(companion, settings, "bos_token")
    return TokenizerSpec(
        tokenizer_json=text,
        chat_template=_chat_template(folder, settings),
        bos_token=bos,
        eos_token=_text(companion, settings, "eos_token"),
        add_bos=_adds_bos(tokenizer, bos, settings),
    )


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _text(path: pathlib.Path, settings: dict, key: str) -> str | None:
    """The text of a special token, given as such or as an object with `content`."""
    token = settings.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{path}: {key} must be text, got {settings[key]!r}")
    return token


def _chat_template(folder: pathlib.Path, settings: dict) -> str | None:
    """The file of its own wins; of several named templates, the one named default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [e for e in template if isinstance(e, dict)]
        default = [e.get("template") for e in named if e.get("name") == "default"]
        template = default[0] if default else None
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template must be text, got {template!r}")
    return template


def _adds_bos(tokenizer: Tokenizer, bos: str | None, settings: dict) -> bool:
    """Whether the original tokenizer starts every text with BOS.

    The setting is optional: many files say it through their post-processor alone.
    """
    if bos is None:
        return False
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    by_processor = bool(ids) and ids[0] == tokenizer.token_to_id(bos)
    return by_processor or bool(settings.get("add_bos_token", False))
