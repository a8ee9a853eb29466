"""Hooks on modules: what must be finished before one runs, is saved or is copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from dos.sharding import ddp
from dos.torch_internals import fsdp2
from dos.torch_internals.modes import is_compiled
from dos.torch_internals.module_dict import set_first
from dos.torch_internals.module_parameters import own_parameters, parameters_of


def check_model(model: object, parameters: Iterable[Tensor]) -> None:
    """Raise TypeError unless it is a model, ValueError unless it has any of the optimizer's parameters."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach() expects the model, an nn.Module, found {type(model).__name__}; call optimizer.attach(model)"
        )
    own = {id(p) for p in parameters}
    if own.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"the model to attach, {type(model).__name__}, has none of the optimizer's parameters; attach the model "
            "whose parameters the optimizer was given, after fully_shard or accelerator.prepare, which replace them"
        )


def refuse_forward(waits: Callable[[Tensor], bool]) -> RemovableHandle:
    """Have the forward of any module raise RuntimeError that has a parameter of which `waits` says so."""

    def check(module: nn.Module, _: Any) -> None:
        if any(p is not None and waits(p) for p in own_parameters(module).values()):
            raise RuntimeError(
                f"{type(module).__name__} ran on the host, and its optimizer was built for an accelerator; call "
                "optimizer.attach(model, weights=...) before the first forward, or move the model there"
            )

    # Of all modules, for the optimizer does not know the model yet.
    return register_module_forward_pre_hook(check)


def lasting(model: nn.Module) -> list[Tensor]:
    """The tensors of a model that outlive its forward."""
    return [*parameters_of(model), *model.buffers()]


class Attachment:
    """A model whose modules wait for their own parameters, so that updates may run into its forward.

    Only parameters of modules that were seen to run may still be in flight when `step()` returns; those of others,
    whose weights are used by another module or by a method that is no forward, are not `covered`, nor those of modules
    that ran while a CUDA graph was captured, for its replays run no hooks. Evaluation, saving, loading, copying and
    pickling wait for everything, a compiled module for everything below it. Under FSDP2 an all-gather waits for its
    shards, and modules, whose parameters are gathered when they run, for none.
    """

    def __init__(self, model: nn.Module, watcher: Any, amount: Any = None) -> None:
        """amount: of what a forward saves leaves; None: of that nothing is asked."""
        self._amount = amount
        # The model's hooks refer to this, and the optimizer does: neither may keep the other alive.
        self._watcher = weakref.ref(watcher)
        self._model = weakref.ref(model)
        self._ran: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        """Modules that were seen to run; whether as a compiled one, with all below it."""
        self._gathered: set[int] = set()
        """The ids of parameters that were seen to be gathered."""
        self._captured: set[int] = set()
        """The ids of parameters that replays of a CUDA graph may read."""
        self._first_use: dict[int, None] = {}
        self.homes: dict[int, Tensor] = {}
        """The parameters of which a block's modules have copies while it computes, by the ids of these."""
        self._ordered = 0
        """How many of these `take_new_order` has given."""
        self._attribute = f"_dos_wait_{id(self)}"  # a model may be attached to several optimizers
        self._handles: list[RemovableHandle] = []
        self._groups = fsdp2.sharded_groups(model)
        self._sharded = weakref.WeakSet(module for group in self._groups for module in fsdp2.modules_of(group))
        """Modules whose parameters FSDP2 gathers."""
        for group in self._groups:
            fsdp2.wait_before_gathering(group, self)
        ddp.wait_before_broadcasts(self)
        self._add(model)
        alone = module_hook(model, self._detach_if_alone)
        self._handles.append(model.register_forward_pre_hook(alone, prepend=True))
        self._handles.append(model.register_forward_hook(module_hook(model, self._after_forward)))

    @property
    def model(self) -> nn.Module | None:
        """None if it is no more."""
        return self._model()

    def surround(self, offload: Any) -> None:
        """If anything is to leave, call `begin` and `end` of `offload` around each forward, even one that raises."""
        amount, model, reference = self._amount, self._model(), weakref.ref(offload)  # a model keeps no optimizer alive
        if amount is None and self.homes:
            amount = 0.0  # none leaves, but each that is of a block's weights has to ask for them in backward
        if amount is None or model is None:
            return
        offload.prepare(amount)
        watcher = self._watcher

        def begin(module: nn.Module) -> None:
            alive = reference()
            # Without its optimizer the model is detached in this very forward, and `end` would not be called.
            if alive is not None and watcher() is not None:
                alive.begin(module, amount, lasting(module))

        def end(module: nn.Module) -> None:
            alive = reference()  # it lives as long as hooks of a forward refer to it
            if alive is not None:
                alive.end(module)

        self._handles += [
            model.register_forward_pre_hook(module_hook(model, begin), prepend=True),
            model.register_forward_hook(module_hook(model, end), always_call=True),
        ]

    def take_new_order(self) -> list[int] | None:
        """The ids of the parameters in the order in which modules first used them; None: as when it was taken last."""
        before, self._ordered = self._ordered, len(self._first_use)
        return list(self._first_use) if self._ordered > before else None

    def covered(self) -> set[int]:
        """The ids of the parameters that a module waits for when it runs: those of modules that were seen to run."""
        ran = {id(p) for module, whole in self._ran.items() for p in self._own(module, recurse=whole)}
        return (ran | self._gathered) - self._captured

    def detach(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        for group in self._groups:
            fsdp2.end_waiting(group, self)
        model = self._model()
        for module in model.modules() if model is not None else ():
            vars(module).pop(self._attribute, None)

    def _detach_if_alone(self, _: nn.Module) -> None:
        """Before a forward, for hooks that are running cannot be taken away."""
        if self._watcher() is None:
            self.detach()

    def _own(self, module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
        """The module's parameters as the optimizer knows them; those of a block that computes are copies."""
        recurse = recurse or isinstance(module, nn.MultiheadAttention)  # it reads its projection's, which never runs
        return [self.homes.get(id(p), p) for p in parameters_of(module, recurse=recurse)]

    def _add(self, module: nn.Module) -> None:
        compiled = is_compiled(module)
        before = module_hook(module, self._before_compiled if compiled else self._before_module)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_state_dict_pre_hook(_Wait(self._finish_all)),
            module.register_load_state_dict_pre_hook(_Wait(self._finish_all)),
        ]
        # So that copying or pickling the module comes to it before the parameters.
        set_first(module, self._attribute, _Wait(on_copy=self._finish_all))
        if not compiled:
            for child in module.children():
                self._add(child)

    def _before_module(self, module: nn.Module) -> None:
        if not module.training:
            self._finish_all(module)
            return
        # Its parameters are gathered ones now; the all-gather has waited for the shards.
        if module in self._sharded:
            return
        own = self._own(module, recurse=False)
        if module not in self._ran:
            self._ran[module] = False
            self._first_use |= dict.fromkeys(map(id, own))
        self.finish(own)

    def before_gathering(self, parameters: Sequence[Tensor]) -> None:
        """FSDP2 is about to read these shards on the present stream."""
        if not self._gathered.issuperset(map(id, parameters)):
            self._gathered.update(map(id, parameters))
            self._first_use |= dict.fromkeys(map(id, parameters))
        self.finish(parameters)

    def _after_forward(self, model: nn.Module) -> None:
        # As backward begins, and before any hook, DDP zeroes in its buckets the gradients of parameters that took no
        # part in forward. Their last updates may be reading these.
        if ddp.gradients_travel():
            self.finish(self._own(model))

    def _before_compiled(self, module: nn.Module) -> None:
        self._ran[module] = True
        self.finish(self._own(module))

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """They are about to be used: wait for their updates."""
        watcher = self._watcher()
        if watcher is not None:
            parameters = list(parameters)
            if watcher.capturing():
                # Replays run no hooks: from now on step() itself waits for these.
                self._captured.update(map(id, parameters))
            watcher.finish_parameters(parameters)

    def _finish_all(self, module: nn.Module | None = None) -> None:
        watcher = self._watcher()
        if watcher is None:
            return
        if module is not None and watcher.capturing():
            self.finish(self._own(module))
        else:
            watcher.synchronize()


@dataclass(eq=False)
class _Wait:
    """A hook on a module; a copy or pickle of it, as made with its module, is one that does nothing."""

    wait: Callable[..., None] | None = None
    on_copy: Callable[[], None] | None = None
    with_arguments: bool = False

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if self.wait is not None:
            self.wait(module, *(arguments if self.with_arguments else ()))

    @property
    def __name__(self) -> str:
        # What torch.jit.script asks for first. Others, such as functools.wraps, can do without it.
        raise AttributeError(
            "torch.jit.script compiles the hooks of a model, too, which it cannot do with those of optimizer.attach(); "
            "script the model before attach(): what is scripted shares the parameters, and so is trained, too"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.on_copy is not None:
            self.on_copy()
        return _Wait, ()


def module_hook(module: nn.Module, call: Callable[..., None], *, with_arguments: bool = False) -> Callable[..., None]:
    """A hook for this module; one on a module that was compiled in place is traced with it, and must not be.

    with_arguments: whether `call` takes those of the hook beside the module.
    """
    hook = _Wait(call, with_arguments=with_arguments)
    return torch.compiler.disable(hook) if is_compiled(module) else hook
