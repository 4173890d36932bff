"""Tests that need GPUs: `make gpu`. Elsewhere they are skipped with the reason, or tried with UNISONO_GPU=dry."""
