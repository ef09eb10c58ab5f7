"""Signatures of functions and annotated names of classes, without evaluating annotations.

Python 3.14 evaluates annotations on demand, and they may name objects that only a type checker imports. So they are
read as texts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

    def signature(function: Callable[..., object], *, follow_wrapped: bool = True) -> inspect.Signature:
        """As that of ``inspect``."""
        return inspect.signature(function, follow_wrapped=follow_wrapped, annotation_format=Format.STRING)

    def declared_in(kind: type) -> Collection[str]:
        """The names that the body of a class annotates."""
        return get_annotations(kind, format=Format.STRING)

else:

    def signature(function: Callable[..., object], *, follow_wrapped: bool = True) -> inspect.Signature:
        """As that of ``inspect``."""
        return inspect.signature(function, follow_wrapped=follow_wrapped)

    def declared_in(kind: type) -> Collection[str]:
        """The names that the body of a class annotates."""
        names: Collection[str] = vars(kind).get("__annotations__", ())
        return names
