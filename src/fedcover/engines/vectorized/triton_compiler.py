"""Triton with a stage that avoids a defect of NVIDIA's assembler; all kernel modules import Triton from here.

ptxas 12.8, 12.9 and 13.0 drop a constant that is added to two packed numbers of 16 bits, and LLVM packs the arithmetic
of indices in this way where it finds that they fit (https://github.com/triton-lang/triton/issues/11581). Such a kernel
reads from wrong places. The stage replaces packed additions by separate ones. It changes no results of other kernels,
so it stays in place for the whole process.
"""

import re
from hashlib import sha256
from typing import Any

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

__all__ = ["separate_additions", "tl", "triton"]

PACKED = re.compile(r"(?m)^(\s*)add\.s16x2\s+(%r\d+), (%r\d+), (%r\d+);")
SEPARATE = (
    r"\1{ .reg .b16 %%a, %%b, %%c, %%d; mov.b32 {%%a, %%b}, \3; mov.b32 {%%c, %%d}, \4;"
    r" add.s16 %%a, %%a, %%c; add.s16 %%b, %%b, %%d; mov.b32 \2, {%%a, %%b}; }"
).replace("%%", "%half_")
STAGE = f"fedcover-{sha256((PACKED.pattern + SEPARATE).encode()).hexdigest()[:16]}"
"""The name of the stage in the keys of Triton's caches; it changes with what the stage does."""


def separate_additions(ptx: str) -> str:
    """Return assembly in which packed additions of 16 bits are separate.

    >>> print(separate_additions("add.s16x2 \\t%r3, %r1, %r2;").replace("; ", ";\\n"))
    { .reg .b16 %half_a, %half_b, %half_c, %half_d;
    mov.b32 {%half_a, %half_b}, %r1;
    mov.b32 {%half_c, %half_d}, %r2;
    add.s16 %half_a, %half_a, %half_c;
    add.s16 %half_b, %half_b, %half_d;
    mov.b32 %r3, {%half_a, %half_b};
    }
    """
    return PACKED.sub(SEPARATE, ptx)


def _with_stage(earlier: Any) -> Any:
    """Return a hook that adds the stage to a compilation, after an earlier hook, if there is one."""

    def hook(backend: Any = None, stages: Any = None, *arguments: Any, **options: Any) -> Any:
        if stages is None:  # Triton asks for what tells the compiled kernels of this hook from others
            key, digest = earlier() if earlier else ("", "")
            return f"{key}-{STAGE}", f"{digest}-{STAGE}"
        if earlier:
            earlier(backend, stages, *arguments, **options)
        if compile_ptx := stages.get("ptx"):
            stages["ptx"] = lambda source, metadata: separate_additions(compile_ptx(source, metadata))
        return None

    return hook


if hasattr(triton.knobs.runtime, "add_stages_inspection_hook"):  # Triton 3.5 or newer
    triton.knobs.runtime.add_stages_inspection_hook = _with_stage(triton.knobs.runtime.add_stages_inspection_hook)
