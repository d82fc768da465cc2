"""Many machines: replicas on Ray Serve behind the server's own application. Only these modules import Ray."""
