"""What is done: the proxy itself. May use `telemetry` and `config`; neither may use this package."""

__version__ = "0.1.0"
