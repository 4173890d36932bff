"""unisono tune: search settings by trials that are runs, with Optuna's samplers and pruners."""
