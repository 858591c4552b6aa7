"""How programs are compiled for a GPU: options of XLA on which bits and waits depend.

The engine, the compile gate, the preflight and the self-check compile with these and
no others.
"""

# One launch for a whole step: nothing returns to the host in between, loops and
# conditionals included.
_COMMANDS = (
    "FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL", "WHILE",
)  # fmt: skip

GPU_OPTIONS: dict[str, bool | int | str] = {
    # Timing candidates picks others in each process, and with them other bits.
    "xla_gpu_autotune_level": 0,
    # Without it an untimed product takes tiles of 16 x 8, and reads each weight once
    # for 16 rows.
    "xla_gpu_experimental_cost_model_gemm_tiling_default": True,
    # XLA splits K by the number of rows: bits would follow the bucket, and partial
    # sums are 6 % of a decode step's traffic (8B, 64 rows).
    "xla_gpu_experimental_force_split_k": 1,
    # Weights in groups with a scale each are made wide within the product that needs
    # them, never in memory (pallas_kernels/quantized_matmul/xla.py).
    "xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True,
    "xla_gpu_enable_command_buffer": ",".join(_COMMANDS),
}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """What `Lowered.compile` is to be given, with jax 0.11.2 and 0.12.

    Args:
      platform: "gpu" or "cpu".

    Returns:
      Options by name; none for a CPU.
    """
    return dict(GPU_OPTIONS) if platform == "gpu" else {}
