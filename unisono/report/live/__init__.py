"""The page of a run that makes progress: a small web server that only reads the files of runs."""
