"""The admin port: another listener than the proxy's, never reachable through it."""
