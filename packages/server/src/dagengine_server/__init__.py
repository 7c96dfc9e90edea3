"""dagengine over HTTP: `create_app`, `serve`, and a client."""

__version__ = "0.1.0"
