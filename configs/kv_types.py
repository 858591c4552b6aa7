"""What keys and values can be stored as."""

from typing import Literal

from headrace.configs.checks import check_choice

KVDtype = Literal["float32", "bfloat16", "int8", "float8_e4m3fn"]

KV_8BIT = ("int8", "float8_e4m3fn")


def check_kv_skip(skip: tuple[int, ...], kv_dtype: str, num_layers: int) -> None:
    """Layers that keep their keys and values in the type of weights.

    Raises:
      ValueError: they do not ascend, there are no such layers, all are named, or the
        others are not of 8 bits.
    """
    if not skip:
        return
    check_choice("kv_dtype beside kv_dtype_skip", kv_dtype, KV_8BIT)
    if list(skip) != sorted(set(skip)) or skip[-1] >= num_layers:
        raise ValueError(
            f"kv_dtype_skip must name layers under {num_layers}, ascending without "
            f"repeats, got {skip}"
        )
    if len(skip) == num_layers:
        raise ValueError(
            f"kv_dtype_skip must leave a layer of the {num_layers}, got all of them"
        )
