"""A second device without the hardware: CPU tensors marked as lying there, and an error where the two meet."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)  # not equal to torch.device("cpu"), and yet its memory
aten = torch.ops.aten
MAY_MIX = (aten.copy_.default, aten._to_copy.default, aten.index.Tensor)  # moves, and a GPU tensor at CPU indices


class FakeDevice:
    """`with FakeDevice() as fake:` tensors made on DEVICE or moved to it lie there, and so do results of such tensors.

    As on a GPU, an operation there may take scalar tensors of the CPU and nothing else of it.
    """

    def __enter__(self):
        self.storages = {}  # by address; kept alive, so that no other tensor gets a marked address
        self.modes = (_Functions(self), _Operations(self))
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)

    def holds(self, tensor):
        """Whether this tensor lies on the device."""
        return _address(tensor) in self.storages

    def put(self, tensor):
        if tensor.numel():
            self.storages[_address(tensor)] = tensor.untyped_storage()
        return tensor

    def fetch(self, tensor):
        copy = tensor.clone()
        self.storages.pop(_address(copy), None)
        return copy


class _Functions(TorchFunctionMode):
    """What operations do not show: the device that a tensor names, torch.tensor, moves back to the CPU."""

    def __init__(self, fake):
        self.fake = fake

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.device.__get__ and self.fake.holds(args[0]):
            return DEVICE
        if function is torch.tensor and kwargs.get("device") == DEVICE:
            return self.fake.put(function(*args, **kwargs))
        to_cpu = function is torch.Tensor.to and (*args[1:2], kwargs.get("device"))[0] in ("cpu", torch.device("cpu"))
        if (to_cpu or function is torch.Tensor.cpu) and self.fake.holds(args[0]):
            return self.fake.fetch(args[0])
        return function(*args, **kwargs)


class _Operations(TorchDispatchMode):
    def __init__(self, fake):
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.numel()]
        there = [self.fake.holds(x) for x in tensors]
        # Autograd places what it makes by itself, and knows nothing of our device.
        is_backward = torch._C._current_graph_task_id() != -1
        if any(there) and operation not in MAY_MIX and not is_backward:
            here = [tuple(x.shape) for x, is_there in zip(tensors, there, strict=True) if not is_there and x.dim()]
            assert not here, f"{operation} on the device got tensors of the CPU, of shape {here}"
        out = operation(*args, **kwargs)
        if is_backward or kwargs.get("device") == DEVICE or (kwargs.get("device") is None and any(there)):
            own = {_address(x) for x in tensors}
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and _address(x) not in own:
                    self.fake.put(x)
        return out


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
