"""Compiles programs for an NVIDIA GPU that is not there, and keeps what ptxas says.

One process compiles for one family of GPUs. Needs, besides jax, `pip install --no-deps
jax-cuda12-plugin==V jax-cuda12-pjrt==V nvidia-cuda-nvcc-cu12` with V jax's version. jax
is imported on first use, after the environment is set.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

TARGETS = pathlib.Path(__file__).parents[1] / "configs" / "gpu_targets"

_MOSAIC_NAME = re.compile(r"^(?:mosaic_gpu_)?(.*?)(?:_mosaic_gpu)?(?:_kernel)?$")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")

_THUNKS = ".thunk_sequence_after_thunk_passes.txt"

_family: list[int] = []


class CompileError(Exception):
    """XLA or ptxas refuses a program."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
      name: of a file in configs/gpu_targets/.
      text: what is in it, the form that XLA takes.
      capability: compute capability, such as (9, 0).
      bytes_per_s: bandwidth of its memory by the vendor's figure.
      num_cores: multiprocessors.
    """

    name: str
    text: str
    capability: tuple[int, int]
    bytes_per_s: int
    num_cores: int

    @property
    def resident(self) -> int:
        """Small blocks of threads that it runs at a time: four a multiprocessor.

        Of two warps each, with 57 KB of shared memory.
        """
        return 4 * self.num_cores


@dataclasses.dataclass(frozen=True)
class PtxasKernel:
    """What ptxas says of a kernel that it compiled: registers a thread, and bytes."""

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
      text: the optimized HLO.
      seconds: lowering and compiling.
      argument_bytes, temp_bytes, alias_bytes: of `memory_analysis()`.
      log: what the compilers wrote meanwhile.
      thunks: what the host starts, by XLA's own dump; empty where it wrote none.
    """

    text: str
    seconds: float
    argument_bytes: int
    temp_bytes: int
    alias_bytes: int
    log: str
    thunks: str


def target_names() -> list[str]:
    """Names that `read_target` takes, sorted."""
    return sorted(path.stem for path in TARGETS.glob("*.textproto"))


def read_target(name: str) -> Target:
    """The GPU that configs/gpu_targets/NAME.textproto describes."""
    text = (TARGETS / f"{name}.textproto").read_text("utf-8")

    capability = re.search(r"capability \{ major: (\d+)(?: minor: (\d+))?", text)
    bandwidth = re.search(r"memory_bandwidth: (\d+)", text)
    cores = re.search(r"core_count: (\d+)", text)
    assert capability and bandwidth and cores
    numbers = int(capability[1]), int(capability[2] or 0)
    return Target(name, text, numbers, int(bandwidth[1]), int(cores[1]))


def set_environment() -> None:
    """Must come before the first `import jax` of the process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"


def compile_for_gpu(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    target: Target,
    donated: tuple[int, ...] = (),
) -> Compiled:
    """Compiles a program for one GPU as an engine there does.

    Comes after `set_environment`.

    Args:
      function: to be compiled.
      args: arrays, or their shapes.
      target: the same family of GPUs in every call of a process.
      donated: places of `args` whose memory the results may take.

    Raises:
      NotImplementedError: the compiler for GPUs is not installed.
      ValueError: the process has compiled for another family before; ptxas would fail.
      CompileError: XLA or ptxas refuses; it holds what they wrote.
    """
    import jax

    from headrace.engine.compile_options import compiler_options
    from headrace.pallas_kernels.gpu_target import compiling_for

    sharding = _one_device(target)
    if _family and _family[0] != target.capability[0]:
        raise ValueError(
            f"one process compiles for one family of GPUs: this one has for compute "
            f"capability {_family[0]}.x, and {target.name} has {target.capability[0]}.x"
        )
    _family[:] = [target.capability[0]]

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    jitted = jax.jit(function, donate_argnums=donated)
    start, log = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as dump:
        options = compiler_options("gpu") | {
            "xla_dump_to": dump,
            "xla_dump_hlo_as_text": True,
        }
        try:
            with compiling_for(target.capability), _captured(log):
                lowered = jitted.lower(*jax.tree.map(placed, args))
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise CompileError(f"{error}\n{log[0]}") from error
        written = sorted(pathlib.Path(dump).glob(f"*{_THUNKS}"))
        thunks = "".join(path.read_text("utf-8") for path in written)
    memory = compiled.memory_analysis()
    return Compiled(
        text=compiled.as_text(),
        seconds=time.perf_counter() - start,
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        log=log[0],
        thunks=thunks,
    )


def _one_device(target: Target) -> Any:
    """A sharding on a device of the target."""
    import jax
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=target.text,
            topology="1x1x1",
        )
    except Exception as error:  # what jax raises differs by version
        raise NotImplementedError(f"no compiler for GPUs here: {error}") from error
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


@contextlib.contextmanager
def _captured(log: list[str]) -> Iterator[None]:
    """Appends what is written to the file descriptors 1 and 2, by ptxas say."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(number) for number in (1, 2)]
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            log.append(file.read().decode("utf-8", "replace"))


def ptxas_kernels(log: str) -> list[PtxasKernel]:
    """The kernels that ptxas printed a register line for.

    Jax 0.12 compiles a kernel that it has seen before no second time, and says nothing.
    """
    pieces = _ENTRY.split(log)[1:]
    kernels = []
    for entry, said in zip(pieces[::2], pieces[1::2], strict=True):
        registers, stacks = _REGISTERS.search(said), _STACK.findall(said)
        if registers is None:
            continue
        kernels.append(
            PtxasKernel(
                name=mosaic_name(entry),
                registers=int(registers[1]),
                spill_bytes=sum(int(out) + int(back) for _, out, back in stacks),
                stack_bytes=sum(int(stack) for stack, _, _ in stacks),
            )
        )
    return kernels


def mosaic_name(entry: str) -> str:
    """The name that a kernel has in our source, from that of its entry function."""
    found = _MOSAIC_NAME.match(entry)
    assert found is not None
    return found[1]
