"""`python -m flows.ephemeral PORT`: Prefect's API for one `convoy run`, and no more than that.

The same app that Prefect starts for a flow without a server. Started here, it loads while the run
loads its own libraries, which halves the wait (7 s for 15 s on two cores, 17 s for 27 s with a new
database), ends with the run however that ends, and is no target of Ctrl-C.
"""

import sys

import uvicorn
from prefect.server.api.server import create_app


def main(port: int) -> None:
    """Serve until SIGTERM."""
    app = create_app(ephemeral=True, final=True)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    main(int(sys.argv[1]))
