"""`hexiopt page`: a page in your browser that plans training on the cards you have; for this machine alone.

It prints its address with a token, and serves until Ctrl-C. What searches write is removed then; download what you want
to keep.
"""

import math
import signal
import socket
import sys
import tempfile
import webbrowser
from pathlib import Path

from experiments.app.cli import main
from experiments.app.common import Job
from hexiopt.errors import InputError


def run(job: Job) -> float:
    """Serve until Ctrl-C; returns NaN. Raises InputError, also without the packages of the extra `page`."""
    page = job.config.page
    try:
        import starlette as starlette
        import uvicorn
    except ImportError as error:
        raise InputError(f"page: needs {error.name}; install it with \"pip install 'hexiopt[page]'\"") from None
    from experiments.web.app import application
    from experiments.web.guard import HOST

    with socket.socket() as listening, tempfile.TemporaryDirectory(prefix="hexiopt-page-") as folder:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, page.port))
        except OSError as error:
            raise InputError(f"page.port: {page.port} cannot be had ({error.strerror}); state another, or 0") from None
        app = application(Path(folder), listening.getsockname()[1], lambda: server.should_exit)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, access_log=False))
        print(f"{app.address}\nfor this machine alone; Ctrl-C ends it", flush=True)
        if page.open:
            webbrowser.open(app.address)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # which uvicorn raises again at its end
        server.run(sockets=[listening])
    return math.nan


if __name__ == "__main__":
    sys.exit(main(["page", *sys.argv[1:]]))
