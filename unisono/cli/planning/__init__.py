"""unisono plan: what each placement of a script would take, in memory and time, before it runs."""
