"""The admin interface over HTTP: the REST endpoints that Pulsar's tools and clients use.

One module per resource. `application.py` puts them together, `exchange.py` is what they share.
"""

from magnetar.server.admin.application import create_admin

__all__ = ["create_admin"]
