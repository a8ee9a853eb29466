"""Refusals of updates during backward, each with its reason and the way out."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from dos.options import Options
from dos.parameters.watching import first_hooked
from dos.sharding import ddp
from dos.sharding.local import is_sharded
from dos.torch_internals import fsdp2
from dos.torch_internals.module_parameters import parameters_of

UNENDED = (
    "a backward has updated parameters, as attach(updates='backward') says, and step() has not ended that iteration; "
    "call optimizer.step() after each backward, or surround each backward that only adds up gradients, or belongs to "
    "another model's loss, with optimizer.no_update()"
)

AGAIN = (
    "the gradient of a parameter of shape {} came once more in a backward that has already updated it: in earlier "
    "backwards it came {} times; attach the model again, which makes the next iteration update in step() and look anew"
)

READ = (
    "a parameter of shape {} was read in the backward that has already updated it, as where checkpointing recomputes "
    "its module: that would compute with the new weights; attach the model again, which makes the next iteration "
    "update in step() and look anew, or attach it without updates='backward'"
)

PART = (
    "the model was used between backward and step(), when some of its parameters are updated, and others will be by "
    "step(), as attach(updates='backward') says; call optimizer.step() first"
)

DOUBLE = (
    "backward(create_graph=True) computes a second derivative with the weights of now, which attach(updates='backward')"
    " would have updated by then; surround it with optimizer.no_update(), or attach the model without updates="
)

HOOK = (
    "a parameter of shape {} has a hook of register_post_accumulate_grad_hook(), which reads p.grad, and "
    "attach(updates='backward') takes that away; use parameter.register_hook(), or attach the model without updates="
)

SPARSE = (
    "a parameter of shape {} has a sparse gradient, which DOSAdam does not update; build the embedding with "
    "sparse=False, or train it with torch.optim.SparseAdam"
)

CAPTURED = (
    "a CUDA graph that captures backward writes gradients where it has found them, and runs no hooks, in which "
    "attach(updates='backward') updates; attach the model without updates="
)

RANKS = (
    "{} reduces gradients after backward's hooks, in which attach(updates='backward') uses them; attach the model "
    "without updates="
)

CHANGED = (
    "the settings of param group {} were changed between backward and step(), too late for the updates that backward "
    "has begun, as attach(updates='backward') says: {} was {} then and is {} now; change settings, as by a scheduler, "
    "after step() and before the next backward"
)

SCALED = (
    "GradScaler scales the loss, and attach(updates='backward') updates before its step() could unscale the gradients; "
    "train in bfloat16 without GradScaler, or attach the model without updates="
)

SET = (
    "user code has set p.grad of a parameter of shape {} before step(), when attach(updates='backward') has taken its "
    "gradient; edit gradients in hooks of parameter.register_hook()"
)

WRITTEN = (
    "user code wrote to a parameter of shape {} between backward and step(), when backward had updated it, as "
    "attach(updates='backward') says; write to parameters after step(), or attach the model without updates="
)

ZEROED = (
    "zero_grad() between backward and step() comes too late: attach(updates='backward') uses gradients while backward "
    "runs; leave out a batch before its backward, or attach the model without updates="
)

STATE_READ = (
    "optimizer.state was read, or a state dict loaded, after a backward that has updated state, and before step() has "
    "ended that iteration, as attach(updates='backward') says; call optimizer.step() first"
)

TAKEN = (
    "another optimizer has used the gradients of {} of this one's parameters, the first of them of shape {}, while "
    "backward ran, as its attach(updates='backward') says; give each parameter to one optimizer, attach that one "
    "without updates=, or delete it"
)

TOUCHED = (
    "the gradients are used while backward runs, as attach(updates='backward') says, so that they can be neither "
    "clipped, measured nor edited before step(); attach the model without updates=, or edit each gradient in a hook of "
    "parameter.register_hook()"
)


def check_updates(model: nn.Module, options: Options) -> None:
    """Raise ValueError if backward cannot update the parameters of this model, with the reason and the way out."""
    problem = None
    if options.max_grad_norm is not None:
        problem = "max_grad_norm= needs the norm of all gradients, known only after backward; leave it out"
    elif options.skip_nonfinite:
        problem = "skip_nonfinite=True needs the norm of all gradients, known only after backward; leave it out"
    parameters = parameters_of(model)
    if problem is None and any(id(p) in ddp.reduced for p in parameters):
        problem = "DistributedDataParallel reduces gradients after backward's hooks; train in one process"
    final = fsdp2.reduced_before_hooks(model)
    if problem is None and any(id(p) not in final for p in parameters if ddp.several_ranks() or is_sharded(p)):
        problem = (
            "ranks divide parameters, or reduce gradients after backward's hooks, unless fully_shard does, without "
            "CPUOffloadPolicy; divide the whole model with it, train in one process"
        )
    if problem is None and any(map(is_lazy, parameters)):
        problem = "uninitialised parameters can have no hooks; run a forward before"
    hooked = first_hooked(parameters)
    if problem is None and hooked is not None:
        raise ValueError(HOOK.format(tuple(hooked.shape)))
    if problem is not None:
        raise ValueError(
            f"attach(updates='backward') updates parameters while backward runs: {problem}, or attach the "
            "model without updates="
        )
