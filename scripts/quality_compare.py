"""A quantized model beside the one that it came of, on the same text."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from headrace.checkpoints.calibrate import Method, calibrated
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.configs.quantization import parse_scheme
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.layers import kv_cache as kv
from headrace.layers import linear
from headrace.layers.inputs import pages_of, whole_prompt
from headrace.layers.models import build_model
from headrace.layers.quantized import is_quantized, tree_bytes
from headrace.scripts.quality_metrics import Agreement, relative_error
from headrace.scripts.quality_needle import Needle, found_share
from headrace.scripts.quality_outliers import outlier_product

_KV = {"kv-int8": "int8", "kv-fp8": "float8_e4m3fn"}
_PAGE = 64
_PLAIN = kv.KVStorage(dtype="float32")

Forward = Callable[[Any, np.ndarray], jax.Array]


class Wanted(NamedTuple):
    """What the name of a scheme asks for; None leaves the weights as they came."""

    rounding: Rounding | None
    method: Method | None = None
    kv_dtype: str = "float32"
    splits_outliers: bool = False


def scheme_of(name: str) -> Wanted:
    """Reads the name of a scheme, of those that `quality_report.py` lists.

    Raises:
      ValueError: no such scheme.
    """
    if name in _KV:
        return Wanted(None, kv_dtype=_KV[name])
    if name == "llm-int8":
        return scheme_of("w8a8")._replace(splits_outliers=True)
    prefix, _, rest = name.partition("-")
    method = {"awq": "awq", "gptq": "gptq", "w8a8": "smooth" if rest else None}
    plain = f"int4-{rest}" if prefix in ("rtn", "awq", "gptq") else name
    scheme = parse_scheme("w8a8" if name == "w8a8-smooth" else plain)
    skip = EngineConfig().quantization_skip
    return Wanted(Rounding(scheme=scheme, skip=skip), method.get(prefix))  # type: ignore[arg-type]


def quantized(
    base: Checkpoint,
    wanted: Wanted,
    calibration: Callable[[], Sequence[np.ndarray]],
    *,
    donate: bool = False,
) -> Checkpoint:
    """The model in a scheme, calibrated where it asks for that.

    Args:
      base: float32, not quantized.
      wanted: the scheme.
      calibration: gives windows of the calibration text.
      donate: see `calibrated`.
    """
    if wanted.rounding is None or wanted.method is None:
        return round_checkpoint(base, wanted.rounding)
    return calibrated(
        base, wanted.rounding, wanted.method, calibration(), donate=donate
    )


def forward_of(
    model: ModelConfig, storage: kv.KVStorage, splits_outliers: bool = False
) -> Forward:
    """forward(params, tokens [T]) -> scores [T, V]: the engine's model, one prompt.

    Args:
      model: its shapes.
      storage: of the pages that keys and values go through.
      splits_outliers: of rows that are quantized, see `quality_outliers.py`.
    """
    module = build_model(model, "float32", storage.skip)

    @jax.jit
    def forward(params: Any, tokens_T: jax.Array) -> jax.Array:
        num_pages = pages_of(tokens_T.shape[0], _PAGE) + 1
        cache = kv.allocate(
            model, num_pages=num_pages, page_size=_PAGE, storage=storage
        )
        inputs = whole_prompt(tokens_T, _PAGE, len(cache))
        replaced = linear.replacing(outlier_product)
        with replaced if splits_outliers else contextlib.nullcontext():
            output, _ = module.apply({"params": params}, cache, inputs)
        return module.apply({"params": params}, output.hidden_BTD[0], method="logits")

    return forward


class Judge:
    """Compares models with one base.

    Args:
      base: the model as it came, in float32.
      texts: windows of T + 1 tokens.
      needles: what a long context is searched for, where KV pages are quantized.
    """

    def __init__(
        self,
        base: Checkpoint,
        texts: Sequence[np.ndarray],
        needles: Sequence[Needle] = (),
    ) -> None:
        self._base, self._texts, self._needles = base, texts, needles
        self._forward = forward_of(base.config, _PLAIN)

    def line(
        self,
        name: str,
        other: Checkpoint,
        storage: kv.KVStorage = _PLAIN,
        splits_outliers: bool = False,
    ) -> dict[str, Any]:
        """A line of the report.

        Args:
          name: what to call it.
          other: of the base's shapes.
          storage: of the pages.
          splits_outliers: see `forward_of`.
        """
        base, forward = self._base, self._forward
        if other is not base or storage != _PLAIN:
            forward = forward_of(base.config, storage, splits_outliers)
        found = Agreement()
        for window in self._texts:
            both = (
                np.asarray(run(params, window[:-1]))
                for run, params in (
                    (self._forward, base.params),
                    (forward, other.params),
                )
            )
            found.add(*both, window[1:])
        page = kv.allocate(base.config, num_pages=1, page_size=_PAGE, storage=storage)
        facts = {
            "scheme": name,
            **found.facts(),
            "bytes": tree_bytes(other.params),
            "base_bytes": tree_bytes(base.params),
            "kv_bytes_per_token": kv.page_bytes(page) // _PAGE,
            "layer_error": layer_errors(base.params, other.params),
        }
        if storage != _PLAIN and self._needles:
            facts["needles"] = found_share(forward, other.params, self._needles)
            facts["base_needles"] = found_share(
                self._forward, base.params, self._needles
            )
        return facts


def layer_errors(base: dict, other: dict) -> dict[str, float]:
    """Relative error of every quantized weight, by its path."""
    plain = dict(jax.tree_util.tree_leaves_with_path(base))
    errors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(other, is_leaf=is_quantized):
        if is_quantized(leaf) and path in plain:
            name = "/".join(str(key.key) for key in path)
            weights = np.asarray(plain[path]), np.asarray(leaf.dequantized())
            errors[name] = relative_error(*weights)
    return errors


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The report for people."""
    rows = [
        "scheme       perplexity  increase   KL mean    KL p99   top-1      MB  worst"
        "  needles"
    ]
    for line in lines:
        worst = max(line["layer_error"].values(), default=0.0)
        needles = line.get("needles", math.nan), line.get("base_needles", math.nan)
        rows.append(
            f"{line['scheme']:<12} {line['perplexity']:>10.3f} "
            f"{line['perplexity_increase']:>9.2%} {line['kl_mean']:>9.5f} "
            f"{line['kl_p99']:>9.4f} {line['top1_agreement']:>7.2%} "
            f"{line['bytes'] / 1e6:>7.1f} {worst:>6.3f}"
            + ("  {:.2f} of {:.2f}".format(*needles) if "needles" in line else "")
        )
    return "\n".join(rows)
