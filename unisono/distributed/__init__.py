"""Process groups and their collectives, the mesh, shared memory, rendezvous and elastic membership."""
