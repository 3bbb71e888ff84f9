"""The admin port: another listener than the proxy's, never reachable through it.

`api.py` puts it together from one file per noun; `route.py` says what a route is, `guard.py` and `access.py` who
may ask, `problem.py` how a refusal looks.
"""
