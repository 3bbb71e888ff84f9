"""What is decided about an upstream's requests, prepared once from its settings.

Law: holds prepared policies, decides nothing. Hosts without settings of their own share one of these.
"""

from __future__ import annotations

from collections.abc import Mapping

from config.errors import ErrorCode
from config.model import Settings, Upstream
from sidecar.policy.backoff import Uniform
from sidecar.policy.breaker import failure_codes
from sidecar.policy.choice import PolicyChoice
from sidecar.policy.classify import Classifier
from sidecar.policy.stages import StageBudgets


class Rules:
    """The policies of one upstream, or of all automatic ones."""

    __slots__ = ("choice", "classifier", "failures", "plain", "registry", "stages", "uniform")

    def __init__(
        self,
        settings: Settings,
        name: str,
        upstream: Upstream,
        registry: Mapping[str, ErrorCode],
        stages: StageBudgets,
        uniform: Uniform,
    ) -> None:
        self.registry = registry
        self.stages = stages
        self.uniform = uniform
        self.choice = PolicyChoice(settings, name, upstream, registry)
        self.classifier = Classifier(registry, upstream.rules, settings.rules)
        self.failures = failure_codes(registry)
        """Codes that speak against an endpoint."""
        self.plain = None if upstream.operations else self.choice.before(None)
        """The policy of every request that asks for nothing itself; None when that depends on the operation."""
