"""A back end of torch for secure.transport=tls: TLS 1.3 between hosts, Unix sockets within one."""
