"""Grafana dashboards, Prometheus rules and runbooks, and the small programs that make and show them.

Law: no part of the product. Nothing in sidecar, telemetry or config imports from here, and the wheel has none of it.
"""
