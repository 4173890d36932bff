"""Run the processes of a run in actors of Ray: one actor a process, in a placement group."""
