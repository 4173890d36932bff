"""What hosts find out about the network between them: signs of life, splits, latency and bandwidth."""
