"""Hooks on modules: a module waits for its updates before it runs, is read, is saved or is copied."""

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
from dos.torch_internals.module_parameters import (
    end_waiting,
    ids_of_own,
    own_parameters,
    parameters_of,
    wait_before_reading,
)


def check_model(model: object, parameters: Iterable[Tensor]) -> None:
    """Raise TypeError unless `model` is a module, ValueError unless it has one of the optimizer's parameters."""
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
    """Make forward raise RuntimeError in each module that has a parameter for which `waits` returns True."""

    def check(module: nn.Module, _: Any) -> None:
        if any(p is not None and waits(p) for p in own_parameters(module).values()):
            raise RuntimeError(
                f"{type(module).__name__} ran on the host, and its optimizer was built for an accelerator; call "
                "optimizer.attach(model, weights=...) before the first forward, or move the model there"
            )

    # A hook on all modules, because the optimizer does not know the model yet.
    return register_module_forward_pre_hook(check)


def lasting(model: nn.Module) -> list[Tensor]:
    """Return the tensors of a model that outlive its forward."""
    return [*parameters_of(model), *model.buffers()]


_READ_BELOW = (nn.MultiheadAttention,)
"""Modules that read the parameters of modules below them, which never run: of a projection."""


class Attachment:
    """A model whose modules wait for their own parameters, so that updates may run into its forward.

    Only parameters of modules that were seen to run may be in flight when `step()` returns. Not `covered` are
    parameters that another module uses or a method other than forward, nor parameters of modules that ran while a CUDA
    graph was captured, because its replays run no hooks. Evaluation, saving, loading, copying and pickling wait for all
    updates, a compiled module for the updates of all modules below it. Under FSDP2 an all-gather waits for its shards;
    modules wait for nothing, because their parameters are gathered before they run. User code that reads a module's
    parameters while updates run waits for those of this module.
    """

    def __init__(self, model: nn.Module, watcher: Any, amount: Any = None, *, reads: bool = True) -> None:
        """Put hooks on the model.

        watcher: the session. amount: how many of the tensors that a forward saves move; None: not asked for.
        reads: whether to wait before user code reads parameters; False where weights stream, which wait by themselves.
        """
        self._amount = amount
        # The model's hooks refer to this, and the optimizer does: neither may keep the other alive.
        self._watcher = weakref.ref(watcher)
        self._model = weakref.ref(model)
        self._ran: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        """Modules that were seen to run."""
        self._whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules that read the parameters of all modules below when they run, as a compiled one does."""
        self._gathered: set[int] = set()
        """The ids of parameters that were seen to be gathered."""
        self._captured: set[int] = set()
        """The ids of parameters that replays of a CUDA graph may read."""
        self._first_use: dict[int, None] = {}
        self.homes: dict[int, Tensor] = {}
        """The parameters of which a block's modules have copies while it computes, by the ids of these."""
        self._ordered = 0
        """The number of parameters in `_first_use` when `take_new_order` was called last."""
        self._attribute = f"_dos_wait_{id(self)}"  # a model may be attached to several optimizers
        self._handles: list[RemovableHandle] = []
        self._read: list[weakref.ref[nn.Module]] = []
        """The modules that have parameters; weak, because the optimizer refers to this."""
        self._groups = fsdp2.sharded_groups(model)
        self._sharded = weakref.WeakSet(module for group in self._groups for module in fsdp2.modules_of(group))
        """Modules whose parameters FSDP2 gathers."""
        for group in self._groups:
            fsdp2.wait_before_gathering(group, self)
        ddp.wait_before_broadcasts(self)
        self._add(model)
        for module in model.modules() if reads else ():
            if own_parameters(module):
                self._read.append(weakref.ref(module))
        alone = module_hook(model, self._detach_if_alone)
        self._handles.append(model.register_forward_pre_hook(alone, prepend=True))
        self._handles.append(model.register_forward_hook(module_hook(model, self._after_forward)))

    @property
    def model(self) -> nn.Module | None:
        """The attached model; None once it was collected."""
        return self._model()

    @property
    def gathers(self) -> bool:
        """Whether FSDP2 gathers parameters, so that modules have others than the optimizer for a while."""
        return bool(self._groups)

    def surround(self, offload: Any) -> None:
        """If saved tensors move, call `begin` and `end` of `offload` around each forward, even one that raises."""
        amount, model, reference = self._amount, self._model(), weakref.ref(offload)  # a model keeps no optimizer alive
        if amount is None and self.homes:
            amount = 0.0  # none moves, but a saved tensor that is a block's weight has to ask for it in backward
        if amount is None or model is None:
            return
        offload.size_pool(amount)
        watcher = self._watcher

        def begin(module: nn.Module) -> None:
            alive = reference()
            # Without its optimizer the model is detached in this very forward, and `end` would not be called.
            if alive is not None and watcher() is not None:
                alive.begin(module, amount, lasting(module))

        def end(module: nn.Module) -> None:
            alive = reference()  # alive as long as hooks of a forward refer to it
            if alive is not None:
                alive.end(module)

        self._handles += [
            model.register_forward_pre_hook(module_hook(model, begin), prepend=True),
            model.register_forward_hook(module_hook(model, end), always_call=True),
        ]

    def take_new_order(self) -> list[int] | None:
        """Return the ids of parameters in the order in which modules first used them; None if none was added since."""
        before, self._ordered = self._ordered, len(self._first_use)
        return list(self._first_use) if self._ordered > before else None

    def covered(self) -> set[int]:
        """Return the ids of the parameters for which a module waits when it runs."""
        # Without a call for each module: each step asks. Not remembered, for user code may replace parameters.
        ran = ids_of_own([module for reference in self._ran.keyrefs() if (module := reference()) is not None])
        if self.homes:
            ran = {id(self.homes[each]) if each in self.homes else each for each in ran}
        ran.update(id(p) for module in self._whole for p in self._own(module))
        return (ran | self._gathered) - self._captured

    def wait_before_reads(self) -> None:
        """Wait before user code reads a module's parameters, until the module runs or `end_waiting` is called."""
        wait_before_reading(self._readable(), self)

    def end_waiting(self) -> None:
        """Undo `wait_before_reads`: no update runs any more."""
        end_waiting(self._readable(), self)

    def _readable(self) -> list[nn.Module]:
        return [module for reference in self._read if (module := reference()) is not None]

    def before_reading(self, parameters: Iterable[Tensor | None]) -> None:
        """Wait for the updates of a module's parameters, which user code is about to read or write."""
        found = [p for p in parameters if p is not None]
        watcher = self._watcher()
        if watcher is not None and not watcher.waiting.reads_in_backward(found):
            self.finish(found)

    before_reading_all = before_reading

    def detach(self) -> None:
        """Remove all hooks."""
        self.end_waiting()
        for handle in self._handles:
            handle.remove()
        for group in self._groups:
            fsdp2.end_waiting(group, self)
        model = self._model()
        for module in model.modules() if model is not None else ():
            vars(module).pop(self._attribute, None)

    def _detach_if_alone(self, _: nn.Module) -> None:
        """Remove all hooks before a forward if the optimizer is gone; a hook that runs cannot be removed."""
        if self._watcher() is None:
            self.detach()

    def _own(self, module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
        """Return the module's parameters as the optimizer knows them: the homes, where a block has copies."""
        recurse = recurse or isinstance(module, _READ_BELOW)
        found = parameters_of(module, recurse=recurse)
        return [self.homes.get(id(p), p) for p in found] if self.homes else found

    def _add(self, module: nn.Module) -> None:
        compiled = is_compiled(module)
        before = module_hook(module, self._before_compiled if compiled else self._before_module)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_state_dict_pre_hook(_Wait(self._finish_all)),
            module.register_load_state_dict_pre_hook(_Wait(self._finish_all)),
        ]
        # First, because copying or pickling the module must wait before it reads the parameters.
        set_first(module, self._attribute, _Wait(on_copy=self._finish_all))
        if not compiled:
            for child in module.children():
                self._add(child)

    def _before_module(self, module: nn.Module) -> None:
        watcher = self._watcher()
        if watcher is None:
            return
        parts = watcher.assembly
        if parts.in_backward is not None and self._uses(watcher, module, recurse=False):
            return
        if not module.training:
            if watcher.waiting.waits():
                self._finish_all(module)
            return
        if parts.on_device is not None:
            parts.on_device.sample_in_forward()
        known = module in self._ran
        if known and not watcher.waiting.waits():
            return
        # Its parameters are gathered now; the all-gather has waited for the shards.
        if not self._groups or module not in self._sharded:
            own = self._own(module, recurse=False)
            if not known:
                self._note_run(module, whole=isinstance(module, _READ_BELOW))
                self._first_use |= dict.fromkeys(map(id, own))
            if own:
                self.finish(own)
        end_waiting((module,), self)  # it reads its parameters several times

    def _note_run(self, module: nn.Module, *, whole: bool) -> None:
        self._ran[module] = None
        if whole:
            self._whole.add(module)

    def _uses(self, watcher: Any, module: nn.Module, *, recurse: bool) -> bool:
        """Return whether backward, which updates parameters, runs this module; raise where that has updated its own."""
        mode = watcher.assembly.in_backward
        if mode is None or not mode.under_way:
            return False
        return mode.check_use(self._own(module, recurse=recurse))

    def before_gathering(self, parameters: Sequence[Tensor]) -> None:
        """Wait for the updates of these shards, which FSDP2 is about to read on the present stream."""
        watcher = self._watcher()
        mode = None if watcher is None else watcher.assembly.in_backward
        if mode is not None and mode.under_way:
            mode.check_use(parameters)
        if not self._gathered.issuperset(map(id, parameters)):
            self._gathered.update(map(id, parameters))
            self._first_use |= dict.fromkeys(map(id, parameters))
        self.finish(parameters)

    def _after_forward(self, model: nn.Module) -> None:
        # As backward begins, and before any hook, DDP zeroes in its buckets the gradients of parameters that took no
        # part in forward. Their last updates may be reading these.
        watcher, reduced = self._watcher(), ddp.reduced
        if reduced and watcher is not None and watcher.waiting.waits():
            self.finish([p for p in self._own(model) if id(p) in reduced])

    def _before_compiled(self, module: nn.Module) -> None:
        watcher = self._watcher()
        if watcher is not None and self._uses(watcher, module, recurse=True):
            return
        self._note_run(module, whole=True)
        self.finish(self._own(module))
        end_waiting(module.modules(), self)

    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the updates of these parameters, which are about to be used."""
        watcher = self._watcher()
        if watcher is not None:
            parameters, captured = list(parameters), watcher.waiting.capturing()
            if captured:
                # Replays run no hooks: from now on step() itself waits for these parameters.
                self._captured.update(map(id, parameters))
            watcher.waiting.finish_parameters(parameters, captured=captured)

    def _finish_all(self, module: nn.Module | None = None) -> None:
        watcher = self._watcher()
        if watcher is None:
            return
        mode = watcher.assembly.in_backward
        if mode is not None:
            mode.check_whole()
        if module is not None and watcher.waiting.capturing():
            self.finish(self._own(module))
        else:
            # User code is about to read all parameters, in any order and on any stream.
            watcher.waiting.synchronize()


@dataclass(eq=False)
class _Wait:
    """A hook on a module. Its copy, which copying or pickling the module makes, does nothing."""

    wait: Callable[..., None] | None = None
    on_copy: Callable[[], None] | None = None
    with_arguments: bool = False

    def __call__(self, module: nn.Module, *arguments: Any) -> None:
        if self.wait is not None:
            self.wait(module, *(arguments if self.with_arguments else ()))

    @property
    def __name__(self) -> str:
        # torch.jit.script reads the name first. Other readers, such as functools.wraps, can do without it.
        raise AttributeError(
            "torch.jit.script compiles the hooks of a model, too, which it cannot do with those of optimizer.attach(); "
            "script the model before attach(): what is scripted shares the parameters, and so is trained, too"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self.on_copy is not None:
            self.on_copy()
        return _Wait, ()


def module_hook(module: nn.Module, call: Callable[..., None], *, with_arguments: bool = False) -> Callable[..., None]:
    """Return a hook for this module, excluded from tracing where the module was compiled in place.

    with_arguments: whether `call` takes the hook's arguments beside the module.
    """
    hook = _Wait(call, with_arguments=with_arguments)
    return torch.compiler.disable(hook) if is_compiled(module) else hook
