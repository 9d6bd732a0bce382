"""Batch normalization of torch modules over the batches of all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.mesh import Mesh
from ..errors import DTypeError, ShapeError
from .process_groups import mesh_of_group
from .tensor_collectives import all_gather, all_reduce
from .tensor_programs import breaks_graph, check_tensor

__all__ = ["SyncBatchNorm"]

Statistics = tuple[torch.Tensor, torch.Tensor, float]
"""(mean and biased variance of each channel, number of values of a channel), over all processes' batches."""


class SyncBatchNorm(_BatchNorm):
    """Batch normalization of any dimension on the CPU, with the statistics of all processes' batches.

    In training mode the input is (N, C, ...). Each process has its own shape and N, which may be 0. Each channel is
    normalized by its mean and variance over all processes' values. These are bitwise equal on all processes.

    The forward pass costs one all_gather of each process's mean, variance and count. Chan's formula combines them. The
    backward pass costs one all_reduce of two sums. All processes call the module in the same order, and run the backward
    pass. In eval mode it does not communicate.

    The gradients of weight and bias are this process's own; sum or average them like all others. You can differentiate the
    backward pass again. The input is float32, float64 or a 16-bit float. Statistics of 16-bit floats are computed in float32;
    the parameters then have the input's dtype or float32. The memory format is kept.

    Args:
        num_features: The number of channels.
        eps: Added to the variance.
        momentum: The share of a new batch in the running statistics. None averages all batches.
        affine: Whether the module has a weight and a bias.
        track_running_stats: Whether the module has running statistics.
        process_group: A mesh from `fc.make_mesh`. None takes all processes of the job; a single process then normalizes its own
            batch.
        device: As in torch.
        dtype: The dtype of the parameters.
        bias: False leaves out the bias.

    Raises:
        ShapeError: If the input has fewer than 2 dimensions, another number of channels, or one value per channel in training.
        DTypeError: If the input is not of real floats, or does not fit the parameters.
        DeviceError, TraceError, MeshError: As collectives of tensors do.

    Example:
        >>> import torch
        >>> from funccoll.torch import SyncBatchNorm
        >>> norm = SyncBatchNorm(1)
        >>> norm(torch.tensor([[1.0], [3.0]])).round(decimals=3).tolist()  # the rows of all processes count
        [[-1.0], [1.0]]

    References:
        Ioffe and Szegedy, 2015.
        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Mesh | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ):
        newer: dict[str, Any] = {} if bias else {"bias": False}  # versions of torch before 2.13 lack it
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **newer)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2:
            raise ShapeError(
                f"SyncBatchNorm: the input has shape {tuple(input.shape)}, and must have at least the dimensions (N, C)."
            )
        if input.shape[1] != self.num_features:
            raise ShapeError(
                f"SyncBatchNorm: the input of shape {tuple(input.shape)} has {input.shape[1]} channels (dimension 1), and the "
                f"module num_features={self.num_features}."
            )
        computed = _dtype_of_statistics(input)
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None and value.dtype not in (input.dtype, computed):
                raise DTypeError(
                    f"SyncBatchNorm: the input is {input.dtype} and {name} {value.dtype}. Convert one of them, for example "
                    f"by module.to({computed})."
                )

    @breaks_graph
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch. The result has its shape, dtype and memory format."""
        self._check_input_dim(input)
        if not self.training:
            return functional.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.running_mean is None and self.running_var is None,
                0.0,
                self.eps,
            )
        check_tensor(input, "SyncBatchNorm")
        mesh = mesh_of_group(self.process_group, "SyncBatchNorm")
        with torch.no_grad():
            mean, var, count = _statistics(input, mesh)
            if count < 2:
                raise ShapeError(
                    f"SyncBatchNorm: in training there must be more than one value per channel, and all {mesh.size} processes "
                    f"together have {count:.0f}; the input here has shape {tuple(input.shape)}. Use larger batches, or eval()."
                )
            self._update_running_statistics(mean, var, count)
        return _Normalization.apply(input, self.weight, self.bias, mean, var, count, mesh, self.eps)

    def _update_running_statistics(self, mean: torch.Tensor, var: torch.Tensor, count: float) -> None:
        """Move the running statistics towards those of a batch. With momentum=None they are the average of all batches."""
        if not self.track_running_stats:
            return
        rate = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if rate is None:
                rate = 1 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            if running is not None:
                running.lerp_(new.to(running.dtype), rate or 0.0)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Mesh | None = None) -> torch.nn.Module:
        """Replace each BatchNorm in `module` by a SyncBatchNorm.

        The new modules take over parameters, running statistics and modes. torch's SyncBatchNorm is replaced as well. A
        module in several places stays one module.

        Args:
            module: A module, which is changed.
            process_group: As in the constructor.

        Returns:
            The module, or the SyncBatchNorm in its place.
        """
        return cls._converted(module, process_group, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_group: Mesh | None, known: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        if module in known:
            return known[module]
        if isinstance(module, _BatchNorm):
            known[module] = cls._of_batch_norm(module, process_group)
            return known[module]
        known[module] = module
        for name, child in module._modules.items():  # named_children leaves out a second name of one child
            if child is not None:
                module._modules[name] = cls._converted(child, process_group, known)
        return module

    @classmethod
    def _of_batch_norm(cls, module: _BatchNorm, process_group: Mesh | None) -> SyncBatchNorm:
        if not module.num_features:
            raise ShapeError(
                f"convert_sync_batchnorm: {type(module).__name__} does not know its number of channels yet. Call the model "
                "once before it is converted."
            )
        made = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_group)
        made._parameters.update(module._parameters)
        made._buffers.update(module._buffers)
        made.training = module.training
        return made


def _dtype_of_statistics(x: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in. Raise DTypeError if the input is not of real floats."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if x.dtype not in (torch.float32, torch.float64):
        raise DTypeError(f"SyncBatchNorm: the input is {x.dtype}, and a batch is normalized in real floats: use x.float().")
    return x.dtype


def _statistics(x: torch.Tensor, mesh: Mesh) -> Statistics:
    """Return the statistics over all processes' batches, combined in float64."""
    channels, dtype = x.shape[1], _dtype_of_statistics(x)
    others = [d for d in range(x.ndim) if d != 1]
    if not x.numel():
        mean = var = x.to(dtype).sum(others)  # zeros that depend on x, so that all processes have the same backward pass
    elif torch.is_grad_enabled():  # differentiable, and much slower
        var, mean = torch.var_mean(x.to(dtype), others, correction=0)
    else:  # the result has the dtype of the running statistics, which this call moves
        moved, like = torch.zeros(2, channels, dtype=dtype)
        mean, var = torch.batch_norm_update_stats(x, moved, like, 0.0)
    if mesh.size == 1:
        return mean, var, x.numel() / max(channels, 1)
    own = torch.cat([mean, var, mean.new_tensor([x.numel() / max(channels, 1)])])
    every = all_gather(own.double().unsqueeze(0), mesh, mesh.axis_names)
    means, variances, counts = every.split([channels, channels, 1], 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    var = (counts * (variances + (means - mean).square())).sum(0) / count
    return mean.to(dtype), var.to(dtype), float(count.detach())


def _per_channel(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return value.view(1, -1, *(1,) * (x.ndim - 2))


class _Normalization(torch.autograd.Function):
    """The normalized batch, from the statistics over all processes' batches. They depend on the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        var: torch.Tensor,
        count: float,
        mesh: Mesh,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias, mean, (var + eps).rsqrt())
        ctx.count, ctx.mesh, ctx.eps = count, mesh, eps
        weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
        return functional.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        x, weight, bias, mean, factor = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_differentiable_gradients(x, weight, bias, cts[0], ctx), *(None,) * 5)
        (ct,), gradient = cts, None
        if x.numel():
            products, sums = torch.ops.aten.native_batch_norm_backward(
                ct, x, mean, None, None, mean, factor, True, ctx.eps, [False, True, True]
            )[1:]
        else:
            products, sums = torch.zeros(2, *mean.shape, dtype=mean.dtype)
        if ctx.needs_input_grad[0]:
            mean_product, mean_ct = all_reduce(torch.stack([products, sums]), ctx.mesh, ctx.mesh.axis_names) / ctx.count
            scale = factor if weight is None else factor * weight
            slope = -scale * factor * mean_product
            offset = -scale * mean_ct - slope * mean
            # scale * (ct - mean_ct - normalized * mean_product), in two passes
            gradient = torch.addcmul(_per_channel(offset, x), x, _per_channel(slope, x))
            gradient = gradient.addcmul_(ct, _per_channel(scale, x)).to(x.dtype)
        of_weight = None if weight is None else products.to(weight.dtype)
        return gradient, of_weight, None if bias is None else sums.to(bias.dtype), *(None,) * 5


def _differentiable_gradients(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, ct: torch.Tensor, ctx: Any
) -> list[torch.Tensor | None]:
    """Return the gradients of x, weight and bias for a second derivative, by differentiating differentiable operations."""
    mean, var, _ = _statistics(x, ctx.mesh)
    out = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel((var + ctx.eps).rsqrt(), x)
    if weight is not None:
        out = out * _per_channel(weight.to(mean.dtype), x)
    if bias is not None:
        out = out + _per_channel(bias.to(mean.dtype), x)
    operands = [v for v, wanted in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if wanted and v is not None]
    found = iter(torch.autograd.grad(out.to(x.dtype), operands, ct, create_graph=True))
    return [next(found) if wanted else None for wanted in ctx.needs_input_grad[:3]]
