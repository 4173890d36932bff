"""Back ends of torch over connections of our own: Unix sockets within a host, TCP or TLS between hosts."""
