"""What a shell or systemd allows by default is no limit of a server."""

import subprocess
import sys

import pytest

STARTS = {
    "serve": "from penstock.service.app.serve import serve; serve(['/no/such/model', '--port=0'])",
    "gateway": "from penstock.clients.cli.main import main; main(['gateway', '--unix-socket=/no/such/socket'])",
}


@pytest.mark.parametrize("command", STARTS)
def test_a_server_may_open_as_many_files_as_the_system_allows(command):
    """It is one that cannot serve: the limit is the first thing that it sees to."""
    code = f"""
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
{STARTS[command]}
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "/no/such" in done.stderr
