"""Tests with real processes: death, shutdown, scripts, strangers, large messages."""
