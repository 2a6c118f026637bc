"""Records: small networks on public tasks, each beside the best published figure. One file per task."""
