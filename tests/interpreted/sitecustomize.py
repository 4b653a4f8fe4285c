"""On PYTHONPATH with TRITON_INTERPRET=1, vLLM's V2 runner starts on a CPU: Triton runs its kernels in an interpreter.

vLLM asks Triton for a backend named "cpu" before it believes in Triton there, and released Tritons have none. The
interpreter needs none either, so a name is all that is put in its place.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import Backend, backends

    class _Interpreter:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(compiler=None, driver=_Interpreter)
