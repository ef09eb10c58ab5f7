"""Tensors that say they lie on a CUDA device, on a build of torch that knows none.

A `FakeTensor` has a `raw`: a tensor of the CPU over fake device memory. Operations on it are enqueued on the current
stream of its device and done by the fake device later; views are made at once; what gives the host a value waits for
the stream, as with a real device. There is no autograd: torch's needs the device's library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_flatten, tree_map

if TYPE_CHECKING:
    from .cuda import FakeCuda

aten = torch.ops.aten
CPU = torch.device("cpu")


class FakeTensor(torch.Tensor):
    """See the module."""

    __slots__ = ("fake", "ordinal", "raw")  # not in `__dict__`, whose attributes travel with a tensor

    raw: torch.Tensor
    fake: FakeCuda
    ordinal: int

    @staticmethod
    def __new__(cls, raw: torch.Tensor, fake: FakeCuda, index: int, requires_grad: bool = False) -> FakeTensor:
        """Over a carrier, whose own `requires_grad` does not count."""
        self: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("cuda", index),
            requires_grad=requires_grad,
        )
        self.raw = raw.detach()
        self.fake = fake
        self.ordinal = index
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        # Without autograd: the engine asks for a guard of the device, and torch ends the process for want of one.
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if special is not None and (special is _copy or (args and isinstance(args[0], FakeTensor))):
                return special(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as of an instance
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            return _copy(*args, **kwargs)
        if func is aten._to_copy.default:
            return _to_copy(*args, **kwargs)
        written = [_is_written(argument) for argument in func._schema.arguments]
        if any(written):
            return _in_place(func, args, kwargs)
        if any(result.alias_info is not None for result in func._schema.returns):
            return _view(func, args, kwargs)
        return _fresh(func, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # of the keyword `tensor_contents`
        self.fake.settle(self.ordinal)
        return f"FakeTensor({self.raw!r}, device='cuda:{self.ordinal}')"


def ghost(raw: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it: as little as an enqueued kernel does."""
    storage = raw.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(raw.size(), raw.stride(), dtype=raw.dtype, device=CPU)
    memory = torch.frombuffer((ctypes.c_ubyte * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    copy = torch.empty(0, dtype=raw.dtype, device=CPU)
    copy.set_(memory.untyped_storage(), raw.storage_offset(), raw.size(), raw.stride())
    if raw.is_conj():
        copy = copy.conj()
    return torch._neg_view(copy) if raw.is_neg() else copy


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _place(args: Any) -> tuple[FakeCuda, int]:
    """The device of the operands; torch's error if they lie on several."""
    fakes = [each for each in tree_flatten(args)[0] if isinstance(each, FakeTensor)]
    indices = {each.ordinal for each in fakes}
    if len(indices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found: cuda {sorted(indices)}")
    return fakes[0].fake, fakes[0].ordinal


def _raw(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.raw
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _meta(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        value = value.raw
    if isinstance(value, torch.Tensor):
        meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return meta.conj() if value.is_conj() else meta
    return torch.device("meta") if isinstance(value, torch.device) else value


def _ghostly(func: Any, value: Any) -> Any:
    """An operand as the device will see it: what lies on the host is passed by value."""
    if isinstance(value, FakeTensor):
        return ghost(value.raw)
    if isinstance(value, torch.Tensor):
        if value.dim() and func.overloadpacket not in (aten.index, aten.index_put_, aten.index_put):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! ({func})"
            )
        return value.detach().clone()
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _raws(args: Any) -> list[torch.Tensor]:
    return [each.raw for each in tree_flatten(args)[0] if isinstance(each, FakeTensor)]


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fake, index = _place((args, kwargs))
    result = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    return tree_map(lambda each: FakeTensor(each, fake, index) if isinstance(each, torch.Tensor) else each, result)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.Tag.inplace_view in func.tags or func.overloadpacket in (aten.set_, aten.resize_):
        raise NotImplementedError(f"{func} of a FakeTensor")
    fake, index = _place((args, kwargs))
    operands = tree_map(lambda each: _ghostly(func, each), (args, kwargs))

    def run() -> None:
        func(*operands[0], **operands[1])

    # Shapes that do not fit are found at the call, as a real device finds them.
    func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
    fake.launch(index, str(func), run, _raws((args, kwargs)))
    if not func._schema.returns:
        return None
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = [named[each.name] for each in func._schema.arguments if _is_written(each)]
    return written[0] if len(written) == 1 else tuple(written)


def _fresh(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fake, index = _place((args, kwargs))
    operands = tree_map(lambda each: _ghostly(func, each), (args, kwargs))
    try:
        shapes = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
    except (NotImplementedError, RuntimeError):  # it depends on values; or is wrong, and raises again
        return _now(fake, index, func, operands)
    if not any(isinstance(each, torch.Tensor) for each in tree_flatten(shapes)[0]):
        return _now(fake, index, func, operands)
    results = tree_map(lambda each: fake.like(each, index) if isinstance(each, torch.Tensor) else each, shapes)
    targets = [ghost(raw) for raw in _raws(results)]

    def run() -> None:
        values = [each for each in tree_flatten(func(*operands[0], **operands[1]))[0] if isinstance(each, torch.Tensor)]
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    fake.launch(index, str(func), run, _raws((args, kwargs, results)))
    return results


def _now(fake: FakeCuda, index: int, func: Any, operands: Any) -> Any:
    """For what the host has to see: after all that the stream was given."""
    fake.settle(index)
    result = func(*operands[0], **operands[1])
    return tree_map(lambda each: fake.tensor_of(each, index) if isinstance(each, torch.Tensor) else each, result)


def _copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    fake = target.fake if isinstance(target, FakeTensor) else source.fake
    fake.transfer(*_located(target), *_located(source), non_blocking)
    return target


def _located(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    return (tensor.raw, tensor.ordinal) if isinstance(tensor, FakeTensor) else (tensor, None)


def _to_copy(self: Any, *, device: torch.device | None = None, non_blocking: bool = False, **options: Any) -> Any:
    options = {name: value for name, value in options.items() if name in ("dtype", "memory_format")}
    shape = torch.empty_like(_meta(self), **options)
    if device is None:
        device = self.device
    if device.type == "cuda":
        result = self.fake.like(shape, device.index or 0)
        return _copy(result, self, True)
    host = self.fake.pinned(shape.untyped_storage().nbytes()) if non_blocking else None
    result = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=CPU)
    if host is not None:  # torch makes it pinned, and the copy comes later
        result.set_(host.untyped_storage(), 0, shape.size(), shape.stride())
    return _copy(result, self, non_blocking)


def _to(self: FakeTensor, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    if args and (args and isinstance(args[0], FakeTensor)):
        args = (args[0].device, args[0].dtype, *args[1:])
    args = tuple(torch.device("cuda", each) if type(each) is int else each for each in args)
    wanted: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    device, dtype, non_blocking, memory_format = wanted
    device = self.device if device is None else device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", self.ordinal)
    dtype = dtype or self.dtype
    if device == self.device and dtype == self.dtype and not copy and memory_format is None:
        return self
    options = {} if memory_format is None else {"memory_format": memory_format}
    return _to_copy(self, device=device, dtype=dtype, non_blocking=non_blocking, **options)


def _cuda(self: FakeTensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:
    return self if device is None else _to(self, device, non_blocking=non_blocking)


def _get_item(self: FakeTensor, key: Any) -> Any:
    keys = key if type(key) is tuple else (key,)
    if all(each is None or each is Ellipsis or type(each) in (int, slice) for each in keys):
        return FakeTensor(self.raw[key], self.fake, self.ordinal)
    self.fake.settle(self.ordinal)
    return self.fake.tensor_of(self.raw[tree_map(_raw, key)], self.ordinal)


def _set_item(self: FakeTensor, key: Any, value: Any) -> None:
    keys = key if type(key) is tuple else (key,)
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in keys):
        raise NotImplementedError("assigning to a FakeTensor's elements by a tensor")
    part = FakeTensor(self.raw[key], self.fake, self.ordinal)
    if isinstance(value, torch.Tensor):
        _copy(part, value)
    else:
        part.fill_(value)


def _contiguous(self: FakeTensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return self if self.raw.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)


def _nonzero(self: FakeTensor, *, as_tuple: bool = False) -> Any:
    self.fake.settle(self.ordinal)
    found = torch.nonzero(self.raw, as_tuple=True) if as_tuple else torch.nonzero(self.raw)
    return tree_map(lambda each: self.fake.tensor_of(each, self.ordinal), found)


def _valued(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gives the host a value."""

    def special(self: FakeTensor, *args: Any) -> Any:
        self.fake.settle(self.ordinal)
        return method(self.raw, *args)

    return special


def _numpy(self: FakeTensor, **_: Any) -> NoReturn:
    raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")


def _pickle(self: FakeTensor, *_: Any) -> NoReturn:
    raise TypeError("a FakeTensor cannot be pickled: a tensor on a device travels by a channel")


def _storage(self: FakeTensor, *_: Any) -> NoReturn:
    raise TypeError("the storage of a FakeTensor: ask for its carrier")


_Tensor = torch.Tensor
_SPECIAL: dict[Any, Callable[..., Any]] = {
    _Tensor.__getitem__: _get_item,
    _Tensor.__setitem__: _set_item,
    _Tensor.contiguous: _contiguous,
    _Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    _Tensor.numpy: _numpy,
    _Tensor.__array__: _numpy,
    _Tensor.to: _to,
    _Tensor.cuda: _cuda,
    _Tensor.copy_: _copy,  # before it gets to autograd's, which wants a guard of the device
    _Tensor.data_ptr: lambda self: self.raw.data_ptr(),
    _Tensor.is_conj: lambda self: self.raw.is_conj(),
    _Tensor.is_neg: lambda self: self.raw.is_neg(),
    _Tensor.is_pinned: lambda self, *_: False,
    _Tensor.untyped_storage: _storage,
    _Tensor.record_stream: lambda self, stream: self.fake.keep(self.raw, stream),
    _Tensor.__deepcopy__: lambda self, _: self.clone(),
    _Tensor.__reduce_ex__: _pickle,
}
_VALUES = "tolist item __int__ __float__ __bool__ __index__ __complex__"
_SPECIAL |= {method: _valued(method) for method in (getattr(_Tensor, name) for name in _VALUES.split())}
