"""Record what happens in a run: events in the timeline, and the operations of a sample."""
