"""What the service's process imports, and what it does without."""

import asyncio
import subprocess
import sys

from penstock.service.app import serve


def test_without_uvloop_the_loop_is_asyncios(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = serve._new_loop()
    assert isinstance(loop, asyncio.SelectorEventLoop)
    loop.close()


def test_the_service_process_never_imports_torch():
    """Does not import packages that only a flag needs."""
    print_them = "print(sorted({'torch', 'transformers', 'triton', 'zmq'} & sys.modules.keys()))"
    code = f"import sys, penstock.service.app.serve; {print_them}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
