"""The page of ``python -m aiorpc dashboard``: a server in a process of its own, which looks at groups from outside.

`watching` looks and remembers, `showing` makes what the page gets, `serving` answers browsers, `static` has the page.
Needs starlette and uvicorn; imports no torch, and changes nothing of what it shows.
"""
