"""The command line: one file per command, imported only when it runs.

`parser.py` knows the words, `admin.py` talks to a running sidecar, `terminal.py` and `table.py` know what a terminal
can show, `screen.py` takes the whole of one. `top.py` shows what `snapshot.py` found the way `topview.py` draws it.
"""
