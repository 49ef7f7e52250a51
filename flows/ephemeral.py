"""`python -m flows.ephemeral PORT`: Prefect's API for one `convoy run`, and no more than that.

The same app that Prefect starts for a flow without a server. Started here, it loads while the run
loads its own libraries, ends with the run however that ends, and is no target of Ctrl-C.
"""

import gc
import sys


def main(port: int) -> None:
    """Serve until SIGTERM."""
    # Loading makes some million objects that stay: not worth looking at, again and again.
    gc.disable()
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")


if __name__ == "__main__":
    main(int(sys.argv[1]))
