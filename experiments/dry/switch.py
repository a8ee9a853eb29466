"""The policy of an optimizer that runs under one policy after the other."""

from __future__ import annotations

from typing import Any

from dos.planning.policies import AdaptivePolicy, resolve_policy
from perfmodel import Plan, Workload


class Switch(AdaptivePolicy):
    """An adaptive policy for the optimizer, which therefore asks for every plan anew."""

    _current: Any = None

    def choose(self, policy: Any) -> None:
        """Let this one answer from now on."""
        self._current = policy if isinstance(policy, AdaptivePolicy) else resolve_policy(policy)

    def __call__(self, workload: Workload) -> Plan:
        return self._current(workload)

    def observe(self, *seen: Any) -> None:
        """Let the policy learn from a step, if it learns."""
        if isinstance(self._current, AdaptivePolicy):
            self._current.observe(*seen)
