"""An OpenAI-compatible server around one engine; FastAPI, uvicorn, Prometheus and llguidance live here."""

from slipstream.core.errors import MissingExtraError

try:
    import fastapi as _fastapi  # noqa: F401
    import prometheus_client as _prometheus  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ImportError as error:
    raise MissingExtraError(error.name or "fastapi", "serve") from error

from slipstream.serve.app import create_app
from slipstream.serve.run import Server, make_server, serve

__all__ = ["Server", "create_app", "make_server", "serve"]
