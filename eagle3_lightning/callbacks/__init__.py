"""Lightning callbacks: export, progress, counters, the resolved configuration."""
