"""What a run will need and how fast it can be, worked out before anything is started."""
