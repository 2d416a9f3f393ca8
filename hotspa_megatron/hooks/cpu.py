"""The CPU stand-in for torch.cuda: lets stock Megatron-LM train on gloo, for laptops, tests and CI.

It maps CUDA devices to the CPU, gives torch.cuda's functions CPU meanings and hands Megatron (and nobody else) an empty
``triton``. No Megatron file is changed and no number is: it only decides where tensors live, and, where Megatron falls back
on torch's AdamW, lets its distributed optimizer load what it saved. It must be installed before ``megatron`` is imported, and
refuses to be where a CUDA device is visible.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import functools
import importlib.util
import logging
import os
import sys
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hotspa_megatron.hooks.patching import Patches

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm", "linspace",
    "eye", "empty_strided", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
_patches = Patches()


def needed() -> bool:
    """Whether this process sees no CUDA device."""
    return installed() or not torch.cuda.is_available()


def installed() -> bool:
    return bool(_patches.replaced)


def install() -> None:
    """Install the stand-in; a second call does nothing.

    Raises RuntimeError where a CUDA device is visible: there Megatron must use it.
    """
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU stand-in refuses to hide a visible CUDA device; set CUDA_VISIBLE_DEVICES= to train on CPU"
        )
    # Megatron's fusers go through torch.compile, which would call a C++ compiler for every fused function.
    _patches.environment("TORCHDYNAMO_DISABLE", "1")
    # Megatron insists on this ordering of GPU work under tensor parallelism; on CPU it is only a value to find.
    _patches.environment("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not hasattr(typing, "override"):
        # Two of Megatron's files need this name of Python 3.12; nothing else of theirs does.
        from typing_extensions import override

        _patches.add(typing, "override", override)
    _replace_cuda_functions()
    _replace_tensor_methods()
    _replace_factories()
    _hand_out_empty_triton()
    _patches.set(torch, "compile", _compile_nothing)
    # CUDA builds of torch would otherwise look for the stream of an accelerator that is not there.
    _patches.set(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    _keep_megatron_helpers_compiled()
    _let_torch_optimizers_be_loaded()
    _copy_what_is_written_meanwhile()
    # Megatron warns that the CPU generator moved under the CUDA one: here they are the same.
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(_not_about_generators)
    _patches.on_undo("logging filter", lambda: logger.removeFilter(_not_about_generators))


def uninstall() -> None:
    """Restore every name that ``install`` replaced."""
    _patches.undo_all()


def replaced() -> tuple[str, ...]:
    """The names that stand replaced now."""
    return _patches.replaced


def _not_about_generators(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


# ---------------------------------------------------------------------------------------------------------- torch.cuda


class _Stream:
    """A stream that has always finished: CPU work is synchronous."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -1)


class _Event:
    """An event that records the wall clock, so that Megatron's event timers stay true."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, _: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, _: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._recorded_s - self._recorded_s) * 1e3


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def _replace_cuda_functions() -> None:
    cuda = torch.cuda
    stream = _Stream()
    # "cpu" properties: Megatron reads the compute capability only to choose kernels that the CPU never reaches.
    properties = types.SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=_machine_bytes(), multi_processor_count=os.cpu_count() or 1, warp_size=32,
        uuid="cpu",
    )  # fmt: skip

    def always(value: Any) -> Callable[..., Any]:
        # A function of its own for every name: torch keeps one rule per function object and refuses to see one twice.
        return lambda *_, **__: value

    replacements: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _local_world_size,
        "current_device": lambda: 0,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "device": lambda *_, **__: contextlib.nullcontext(),
        "get_device_properties": lambda *_, **__: properties,
        "get_device_capability": lambda *_, **__: (8, 0),
        "get_device_name": lambda *_, **__: "CPU",
        "memory_stats": lambda *_, **__: collections.defaultdict(int),
        "mem_get_info": lambda *_, **__: (_machine_bytes(), _machine_bytes()),
        "is_current_stream_capturing": lambda: False,
        # torch.manual_seed also seeds CUDA: through the generator itself there is no recursion.
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": always(None),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        # Work that torch.cuda would queue until its initialisation has to run now.
        "_lazy_call": lambda work, **_: work(),
    }
    for name in ("init", "_lazy_init", "set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect",
                 "reset_peak_memory_stats"):  # fmt: skip
        replacements[name] = always(None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "utilization",
                 "temperature", "power_draw", "clock_rate", "device_memory_used"):  # fmt: skip
        replacements[name] = always(0)
    for name, function in replacements.items():
        _patches.set(cuda, name, function)
    for name in ("get_rng_state", "set_rng_state"):
        _patches.set(cuda.random, name, replacements[name])
    _patches.set(cuda, "Stream", _Stream)
    _patches.set(cuda, "Event", _Event)
    _patches.set(cuda, "default_generators", (torch.default_generator,) * _local_world_size())
    nvtx = {name: always(0) for name in ("range_push", "range_pop", "mark")}
    _patches.set(cuda, "nvtx", types.SimpleNamespace(**nvtx, range=lambda *_, **__: contextlib.nullcontext()))


# ------------------------------------------------------------------------------------------------- tensors and devices


def _to_cpu(device: Any) -> Any:
    """The CPU for anything that names a CUDA device; everything else as it is."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return _CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    return device


def _replace_factories() -> None:
    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = _to_cpu(kwargs["device"])
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in _FACTORIES:
        _patches.wrap(torch, name, on_cpu)


def _replace_tensor_methods() -> None:
    tensor = torch.Tensor

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    def moves_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = _to_cpu(kwargs["device"])
            return original(
                self, *(_to_cpu(a) if isinstance(a, (int, str, torch.device)) else a for a in args), **kwargs
            )

        return to

    def named_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
        # Megatron's optimizers sort parameters by the name "torch.cuda.FloatTensor" and its like.
        @functools.wraps(original)
        def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
            if dtype is None:
                return original(self).replace("torch.", "torch.cuda.", 1)
            return original(
                self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, *args, **kwargs
            )

        return type_

    for name in ("cuda", "pin_memory"):
        _patches.add(tensor, name, stay)
    _patches.add(tensor, "record_stream", lambda self, stream: None)
    _patches.wrap(tensor, "to", moves_to_cpu)
    _patches.wrap(tensor, "type", named_as_cuda)
    _patches.set(torch.nn.Module, "cuda", stay)


def _compile_nothing(model: Any = None, **_: Any) -> Any:
    return model if model is not None else (lambda function: function)


# ----------------------------------------------------------------------------------------- what Megatron needs to import


class _EmptyModule(types.ModuleType):
    """Stands for a module whose kernels are never launched: any attribute exists, decorators return their function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _EmptyModule(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function=None, *_, **__: function

    def __getitem__(self, _: Any) -> _EmptyModule:
        return self


def _hand_out_empty_triton() -> None:
    """Megatron imports triton unguarded where its kernels are defined; CPU builds of torch bring none.

    Only importers inside ``megatron`` get the empty module: in ``sys.modules`` it would mislead torch itself.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    triton = _EmptyModule("triton")
    vars(triton)["__version__"] = "0"
    real_import = builtins.__import__

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> types.ModuleType:
        importer = str((globals or {}).get("__name__", ""))
        if level == 0 and name.split(".", 1)[0] == "triton" and importer.split(".", 1)[0] == "megatron":
            module: Any = triton
            # `import a.b` binds a; `from a.b import c` wants b itself.
            for part in name.split(".")[1:] if fromlist else ():
                module = getattr(module, part)
            return typing.cast(types.ModuleType, module)
        return real_import(name, globals, locals, fromlist, level)

    _patches.set(builtins, "__import__", import_)


def _keep_megatron_helpers_compiled() -> None:
    """Wheels bring the compiled dataset helpers but not the Makefile that Megatron calls to compile them at start."""
    if "megatron" in sys.modules:
        loaded = [name for name in sys.modules if name.startswith("megatron.core")]
        if loaded:
            _patches.undo_all()
            raise RuntimeError("the CPU stand-in has to be installed before megatron is imported")
    with quiet_imports():
        import megatron.core.datasets.utils as dataset_helpers

        try:
            from megatron.core.datasets import helpers_cpp  # noqa: F401
        except ImportError:
            return
    _patches.set(dataset_helpers, "compile_helpers", lambda: None)


def _let_torch_optimizers_be_loaded() -> None:
    """Without Apex or Transformer Engine, Megatron's distributed optimizer cannot load its own checkpoint.

    It asks for the step of a state that is not there yet; then it counts the steps of all parameters in one tensor, and takes
    for their value that of the state before the checkpoint. GPUs have fused optimizers, of which none of this is true.
    """
    with quiet_imports():
        from megatron.core.optimizer import distrib_optimizer
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def state_dict(self: Any) -> Any:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    if not state:  # as AdamW's own first step begins
                        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                        state.update(step=torch.zeros(()), **moments)
            return original(self)

        return state_dict

    def keeping_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
            group, index = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
            step = state.pop("step").clone()
            with torch.no_grad():  # in fp32 it writes into the parameters themselves
                original(self, model_param, tensors)
            state["step"] = step

        return set_main_param_and_optimizer_states

    optimizer = distrib_optimizer.DistributedOptimizer
    _patches.wrap(optimizer, "state_dict", beginning)
    _patches.wrap(optimizer, "_set_main_param_and_optimizer_states", keeping_the_step)


def _copy_what_is_written_meanwhile() -> None:
    """With --async-save, Megatron's writer copies what is saved from the GPU and then lets the training go on.

    What lies on the CPU it would not copy, and write as the next steps leave it.
    """
    with quiet_imports():
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def copying(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def preload_tensors(write_buckets: Any, *rest: Any, **options: Any) -> Any:
            copied = [
                (file, key, (texts, [(item, tensor.clone()) for item, tensor in tensors]))
                for file, key, (texts, tensors) in write_buckets
            ]
            return original(copied, *rest, **options)

        return preload_tensors

    name = "preload_tensors"
    _patches.set(FileSystemWriterAsync, name, staticmethod(copying(getattr(FileSystemWriterAsync, name))))


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Megatron warns of every optional package at import; on CPU none of them is missed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
