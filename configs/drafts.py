"""Who drafts: the words that name a proposer, and the shapes that follow from it."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from headrace.configs.checks import check_choice, check_int, check_tuple
from headrace.configs.mapping import FromMapping
from headrace.configs.model_config import ModelConfig
from headrace.configs.quantization import parse_scheme

Acceptance = Literal["exact", "rejection"]
DraftKind = Literal[
    "prompt-lookup", "self-layers", "self-quantized", "medusa", "eagle", "model"
]
MAX_DRAFTS = 7  # a decode kernel takes 8 query tokens a row


@dataclasses.dataclass(frozen=True)
class DraftSpec:
    """A proposer's name, taken apart.

    Attributes:
      kind: what drafts.
      argument: number of layers, scheme, path of the head, or name of the model.
    """

    kind: DraftKind
    argument: str = ""


def parse_draft(text: str) -> DraftSpec:
    """Reads what a config's `draft` says.

    Args:
      text: "prompt-lookup"; "self:4" (the target's first four layers); "self:int4-g64"
        (the target rounded to a scheme, "self:int4" being "self:int4-g64");
        "medusa:PATH", "eagle:PATH"; or the name of a model.

    Raises:
      ValueError: nothing of this kind.
    """
    if not isinstance(text, str) or not text:
        raise ValueError(
            "draft must be 'prompt-lookup', a model, 'self:LAYERS', 'self:SCHEME', "
            f"'medusa:PATH' or 'eagle:PATH', got {text!r}"
        )
    if text == "prompt-lookup":
        return DraftSpec("prompt-lookup")
    prefix, colon, argument = text.partition(":")
    if not colon or prefix not in ("self", "medusa", "eagle"):
        return DraftSpec("model", text)
    if not argument:
        raise ValueError(f"draft {text!r} needs something behind the colon")
    if prefix == "medusa":
        return DraftSpec("medusa", argument)
    if prefix == "eagle":
        return DraftSpec("eagle", argument)
    if argument.isdecimal():
        check_int("draft layers", int(argument), 1)
        return DraftSpec("self-layers", argument)
    scheme = "int4-g64" if argument == "int4" else argument
    parse_scheme(scheme)
    return DraftSpec("self-quantized", scheme)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftShapes(FromMapping):
    """What memory and programs follow from, known once the draft is loaded.

    Attributes:
      model: what runs for each draft; of a head the layers that it has itself.
      weights_bytes: of its weights, those that it shares with the target not counted.
      has_pages: it keeps keys and values of its own, in the target's pages.
      hidden_dim: of the target's hidden states that it reads; 0 reads none.
      aux_layers: of the target, whose inputs it reads instead of the last hidden state.
      draft_vocab: tokens that it can draft, where these are not all.
    """

    model: ModelConfig
    weights_bytes: int
    has_pages: bool = False
    hidden_dim: int = 0
    aux_layers: tuple[int, ...] = ()
    draft_vocab: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.model, Mapping):
            model = ModelConfig.from_mapping(self.model)
            object.__setattr__(self, "model", model)
        check_int("weights_bytes", self.weights_bytes, 0)
        check_choice("has_pages", self.has_pages, (False, True))
        check_int("hidden_dim", self.hidden_dim, 0)
        check_tuple("aux_layers", self.aux_layers)
        check_int("draft_vocab", self.draft_vocab, 0)
