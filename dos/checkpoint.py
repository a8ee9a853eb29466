"""Loading by torch.distributed.checkpoint of optimizer state that was saved in another format."""

from __future__ import annotations

import functools
import operator
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dos.rules.entries import MAX_KEY, empty_for, has_codes, write_entry
from perfmodel.format import CODED_KEYS, REST_KEY, STATE_KEYS


@dataclass
class _Conversion:
    """One parameter's tensors of state that the checkpoint has in another format.

    read: tensors for the checkpoint's values, by its names. written: the tensors that are computed from them.
    like: a tensor in the parameter's shape and placement. left: the number of reads into `read` that have not ended.
    """

    read: dict[str, Tensor]
    written: dict[str, Tensor]
    like: Tensor
    left: int = 0


class LoadPlanner(DefaultLoadPlanner):
    """Loads optimizer state of any format into any other one, in place; all else as torch's default planner does. ::

        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        torch.distributed.checkpoint.load(state, checkpoint_id="checkpoint", planner=LoadPlanner())
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    The saved and the loading optimizer may each be DOSAdam, with any ``state_format``, ``master_weights`` and
    ``amsgrad``, or AdamW, on any number of ranks. Masters that the checkpoint does not have are set to the parameters.
    During the load each tensor that is converted takes memory beside the state. Takes the arguments of
    ``DefaultLoadPlanner``, and serves one load. Raises as that does for state that the checkpoint has in no format.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._conversions: dict[str, _Conversion] = {}
        self._lock = threading.Lock()  # some storage readers call `commit_tensor` on several threads
        if metadata is None or not self.flatten_state_dict:
            return
        entries: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, value in self.state_dict.items():
            prefix, _, key = name.rpartition(".")
            if key in STATE_KEYS and isinstance(value, Tensor):
                entries[prefix][key] = value
        for prefix, entry in entries.items():
            saved = {key: metadata.state_dict_metadata.get(f"{prefix}.{key}") for key in STATE_KEYS}
            there = {key for key, value in saved.items() if isinstance(value, TensorStorageMetadata)}
            rest = saved[REST_KEY]
            if isinstance(rest, TensorStorageMetadata) and rest.properties.dtype != torch.bfloat16:
                there.discard(REST_KEY)  # another optimizer has cast it, so that its bits are lost
            self._plan_conversion(prefix, entry, there)

    def _plan_conversion(self, prefix: str, entry: dict[str, Tensor], saved: set[str]) -> None:
        """Plan to read the tensors that the checkpoint has, and to compute from them the ones that it lacks."""
        written = {key: value for key, value in entry.items() if key not in saved}
        among_saved = dict.fromkeys(saved, True)
        if any(moment not in saved and not has_codes(among_saved, moment) for moment in CODED_KEYS):
            return  # the default planner raises an error for it
        comes = MAX_KEY in saved and MAX_KEY not in entry
        if not written and not comes:
            return
        name, like = next((key, value) for key, value in entry.items() if not key.endswith("_scales"))
        read = {key: empty_for(key, like) for key in STATE_KEYS if key in saved and key not in entry}
        if comes:
            *path, last = self.mappings[f"{prefix}.{name}"]
            place: Any = functools.reduce(operator.getitem, path, self.original_state_dict)  # type: ignore[arg-type]
            place[str(last).removesuffix(name) + MAX_KEY] = read[MAX_KEY]
        self._conversions[prefix] = _Conversion(read, written, like)
        for key in written:
            del self.state_dict[f"{prefix}.{key}"]
        self.state_dict.update({f"{prefix}.{key}": tensor for key, tensor in read.items()})

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        for conversion in map(self._conversion_of, plan.items):
            if conversion is not None:
                conversion.left += 1
        for prefix in [prefix for prefix, conversion in self._conversions.items() if not conversion.left]:
            self._convert(prefix)
        return plan

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        with self._lock:
            conversion = self._conversion_of(read_item)
            if conversion is not None:
                conversion.left -= 1
                if not conversion.left:
                    self._convert(read_item.dest_index.fqn.rpartition(".")[0])

    def _conversion_of(self, item: ReadItem) -> _Conversion | None:
        """Return the conversion for which this item is read, if any."""
        prefix, _, key = item.dest_index.fqn.rpartition(".")
        conversion = self._conversions.get(prefix)
        return conversion if conversion is not None and key in conversion.read else None

    def _convert(self, prefix: str) -> None:
        conversion = self._conversions.pop(prefix)
        write_entry(conversion.read, conversion.like, conversion.written)
        for key in conversion.read:
            del self.state_dict[f"{prefix}.{key}"]
