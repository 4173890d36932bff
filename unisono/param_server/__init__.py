"""Parameter servers, synchronous and asynchronous."""
