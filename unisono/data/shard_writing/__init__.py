"""Write shards and their index from a folder of files. Needs no torch."""
